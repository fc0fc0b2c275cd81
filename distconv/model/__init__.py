"""Models on shards: their calls, parameters, gradients and checkpoints.

`calls` takes the place of ``nn.Module.__call__``; `running` has the state of one outermost call. `parameters` shards
parameters, `uses` gives functions the tensors that represent them, and `gradients` sums gradients over the ranks.
`direct` has short paths for common layers, and `compiled` does the work of a call within graphs of torch.compile.
"""
