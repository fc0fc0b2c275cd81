"""Operands: this rank's parts of the tensors that an operator reads, whose layouts may differ, and what moves for it.

Where an operator reads several tensors, an axis shards what it shards of one of them, so that least moves. A tensor
that is sharded by another dim trades it for this one, so that a rank has no more than its share.
"""
