"""The end of distconv in a program: torch is as it was before."""

from __future__ import annotations

from distconv.model.running import inside
from distconv.private_names import SHUTDOWN, require
from distconv.tensors import hooks
from distconv.tensors.replacements import put_back


def shutdown() -> None:
    """Leaves torch as it was before distconv was imported: every attribute that was replaced is what it was.

    Models of `parallelize` and `in_turn` then run whole, on this rank alone. DTensors on distconv's meshes, such as
    parameters of split channels, are torch's. The process groups stay. `init`, `parallelize`, `shard` and `in_turn`
    may be called again afterwards. In other threads that have called a distributed model, plain tensors still mix with
    DTensors as under torch's `implicit_replication`.

    Raises:
        RuntimeError: one line, within `distributed_script`, which `distconv run` puts around a script, or within a
            model's call.
    """
    if hooks.scripts or inside.run is not None:
        where = "a script that runs distributed" if hooks.scripts else "a model's call"
        raise RuntimeError(f"distconv.shutdown within {where}; accepted: after it")
    require(SHUTDOWN)
    put_back()
