"""Batch, group, instance and layer normalization over statistics of the whole tensor; samples, channels, space sharded.

Each is one computation (`rows`) on a view (outer, rows, inner...) of the shard, and normalizes its rows: the channels
of a batch, the channels of each sample (in groups that share their statistics), or the positions before the normalized
dims. A pass exchanges one small message: in forward the mean and the sum of squared deviations of every row or group,
in backward two sums of each. Groups and layers whose statistics are on one rank run the stock operator.
"""
