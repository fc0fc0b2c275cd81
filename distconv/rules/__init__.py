"""Rules: what an operator does when its tensors are DTensors with sharded samples or space.

A rule per file, each with the same sequence: a plan (pure, cached by shapes), the rule, its adjoint. To write one:

1. ``@rule("aten::name", "aten::other.overload")`` registers ``handler(func, *args, **kwargs)`` for the operator, below
   autograd, for every DTensor; register the operator's backward likewise. It must return what the operator returns, as
   DTensors.
2. ``layout(x)`` gives (mesh, placements); x.shape is global, ``x._local_tensor`` the shard. ``shard_axes(x)`` maps
   tensor dim to mesh axis.
3. Decide everything from global shapes, so that every rank decides alike; raise ``refuse(func, why)`` before any
   communication. Where the rule does not concern these arguments, ``return stock(func, args, kwargs)``: DTensor's own
   behaviour (guarded).
4. Per sharded dim: ``owned = ownership(extent, ranks)``; from the interval of outputs each rank owns derive a ``Need``
   of inputs (``exchange.window``, or any pieces); ``which = exchange(mesh, axis, dim, owned, needs)``;
   ``which.fetch(local, fill)``. Do one dim after the other: corners come by themselves. ``which.adjoint(grad)``, in the
   reverse order, is the backward.
5. Run the ordinary ``torch.ops.aten`` operator on plain local tensors; an empty shard skips the call, never the fetch.
6. ``wrap(local, mesh, placements, shape)`` makes the result without communication; sums over shards are ``Partial()``.
7. Other tensor arguments: ``local_as(t, mesh, placements)`` (plain tensors count as replicated; slicing is free,
   gathering refused).
8. Keep plans in a ``functools.lru_cache`` keyed by (mesh, placements, shapes, arguments): the fixed cost per call
   matters most.
9. Import the file in ``distconv/__init__.py``.
10. Test it against stock torch in float64: output, input gradient, parameter gradients, uneven and empty shards.
"""
