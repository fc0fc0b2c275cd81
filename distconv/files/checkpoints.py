"""Checkpoints of torch.distributed.checkpoint in the folder of an earlier one, which stays whole until the new one is.

Torch writes over the files of the earlier one, and has none if a rank is killed meanwhile. Here files of the new one
have names of their own. `.metadata`, which contains them, is replaced at the end, and then the other files go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from mucudnn.process.substitution import substituted

MODULE = "torch.distributed.checkpoint.filesystem"


@contextlib.contextmanager
def last_one_kept(module: ModuleType) -> Iterator[None]:
    """A context in which the module's `FileSystemWriter` saves so. Derived classes do as in torch."""
    writer = module.FileSystemWriter
    write, finish = writer.write_data, writer.finish

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        data = plan.storage_data
        if type(self) is writer and any(Path(self.path).glob(f"{data.prefix}*")):
            plan = replace(plan, storage_data=replace(data, prefix=f"{data.prefix}{self.save_id}_"))
        return write(self, plan, planner)

    def end(self: Any, metadata: Any, results: Any) -> None:
        if type(self) is not writer:
            finish(self, metadata, results)
            return
        with substituted(self.fs, rm_file=lambda path: None):  # .metadata, which is renamed over instead
            finish(self, metadata, results)
        named = {info.relative_path for info in metadata.storage_data.values()}
        for path in Path(self.path).glob("__*.distcp" if self.use_collectives else f"__{self.rank}_*.distcp"):
            if path.name not in named:
                path.unlink()

    with substituted(writer, write_data=write_data, finish=end):
        yield
