"""What a test asks about messages: which collectives were called, and that a refusal comes before any of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Self

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from distconv.tensors.gathering.record import model_call


class Collectives(TorchDispatchMode):
    """Notes the names of all collectives of torch.distributed that are called while it is on, in `called`.

    Every one of them, functional or not, is an operator of torch's dispatcher; but a process group written in Python,
    as that over MPI is, is called directly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        module = sys.modules.get("distconv.mpi.group")
        self._over_mpi = module and module.MPIProcessGroup

    def __enter__(self) -> Self:
        if self._over_mpi:
            self._work = work = self._over_mpi._work

            def noting(*args: Any, **kwargs: Any) -> Any:
                self.called.append(sys._getframe(1).f_code.co_name)
                return work(*args, **kwargs)

            self._over_mpi._work = noting
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._over_mpi:
            self._over_mpi._work = self._work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operators that its rule calls come here
        if func.namespace in ("c10d", "_c10d_functional"):
            self.called.append(func._opname)
        return func(*args, **(kwargs or {}))


def refusals(attempts: Iterable[Callable[[], Any]]) -> list[str]:
    """The error of each attempt within a model's call, as "type: message".

    An attempt that gives no error, or communicates first, fails.
    """
    messages = []
    for attempt in attempts:
        with Collectives() as collectives:
            try:
                with model_call():
                    attempt()
                message = "no error"
            except (RuntimeError, NotImplementedError, ValueError) as error:
                message = f"{type(error).__name__}: {error}"
        assert not collectives.called, f"{collectives.called} before {message}"
        messages.append(message)
    return messages
