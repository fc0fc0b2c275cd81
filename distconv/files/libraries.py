"""Libraries that open files without Python's file functions: from their import on they are given this rank's path.

That which writes checkpoints in parts keeps the last one (`last_one_kept`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from distconv.files.functions import Files
from mucudnn.process import substituted

MODULE = "torch.distributed.checkpoint.filesystem"  # This writes checkpoints in parts.


@contextlib.contextmanager
def last_one_kept(module: ModuleType) -> Iterator[None]:
    """A context in which a checkpoint of torch.distributed.checkpoint in the folder of an earlier one leaves that one
    whole until the new one is.

    Torch writes over the files of the earlier one, and has none if a rank is killed meanwhile. Here files of the new
    one have names of their own. `.metadata`, which contains them, is replaced at the end, and then the other files go.
    Classes derived from the module's `FileSystemWriter` do as in torch.
    """
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


Translate = Callable[[str, str], str]
"""From a path and a mode ("r", "r+", "a", "w") to the path that a library may open."""

LIBRARIES: dict[str, tuple[tuple[str, int, str | None, str], ...]] = {
    "torch": (
        ("save", 1, "f", "w"),
        ("load", 0, "f", "r"),
        ("from_file", 0, "filename", "r+"),
        ("UntypedStorage.from_file", 0, "filename", "r+"),
    ),
    "torch.jit": (
        # torch.jit.save calls these methods.
        ("ScriptModule.save", 1, "f", "w"),
        ("RecursiveScriptModule.save", 1, "f", "w"),
        ("ScriptFunction.save", 1, "filename", "w"),
        ("load", 0, "f", "r"),
    ),
    "torch.export.pt2_archive._package": (
        ("PT2ArchiveWriter.__init__", 1, "archive_path_or_buffer", "w"),
        ("PT2ArchiveReader.__init__", 1, "archive_path_or_buffer", "r"),
    ),
    "torch.package.package_exporter": (("PackageExporter.__init__", 1, "f", "w"),),
    "torch.package.package_importer": (("PackageImporter.__init__", 1, "file_or_buffer", "r"),),
    "sqlite3": (("connect", 0, "database", "a"),),
    "h5py": (("File.__init__", 1, "name", "mode"),),
    "safetensors": (("serialize_file", 1, "filename", "w"), ("safe_open", 0, "filename", "r")),
    "safetensors.torch": (("serialize_file", 1, "filename", "w"), ("safe_open", 0, "filename", "r")),
    "safetensors.numpy": (("serialize_file", 1, "filename", "w"), ("safe_open", 0, "filename", "r")),
    "pyarrow": (("memory_map", 0, "path", "mode"),),
    "cv2": (("imwrite", 0, "filename", "w"), ("imread", 0, "filename", "r")),
    "SimpleITK": (
        # SimpleITK.ReadImage and WriteImage call these methods; a series has a list of paths.
        ("ImageFileReader.SetFileName", 1, "fn", "r"),
        ("ImageSeriesReader.SetFileNames", 1, "fileNames", "r"),
        ("ImageFileWriter.SetFileName", 1, "fileName", "w"),
        ("ImageFileWriter.Execute", 2, None, "w"),
        ("ImageSeriesWriter.SetFileNames", 1, "fileNames", "w"),
        ("ImageSeriesWriter.Execute", 2, None, "w"),
    ),
}
"""By module: a function, the place and the name of its path, and how it opens it ("mode": as its argument says)."""


def translator(files: Files) -> Translate:
    """The path that a library may open, as this rank's `files` have it; what is not there is left as it is."""

    def translate(path: str, mode: str) -> str:
        name = files.names.name(path)
        if mode == "r":
            try:
                return files.read(name, str)
            except OSError:
                return path
        return files.for_writing(name, exclusive=mode == "x", content=mode not in ("w", "x"))

    return translate


@contextlib.contextmanager
def translated(translate: Translate) -> Iterator[None]:
    """A context in which the functions of LIBRARIES open this rank's paths, in all modules imported before or later."""
    with contextlib.ExitStack() as undo:

        def take(module: ModuleType) -> None:
            for function, position, name, mode in LIBRARIES[module.__name__]:
                _replace(module, function, position, name, mode, translate, undo)

        takes: dict[str, Callable[[ModuleType], object]] = dict.fromkeys(LIBRARIES, take)
        takes[MODULE] = lambda module: undo.enter_context(last_one_kept(module))
        for name in [name for name in takes if name in sys.modules]:
            takes[name](sys.modules[name])
        finder = _Finder(takes)
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
        yield


def _replace(
    module: ModuleType,
    function: str,
    position: int,
    name: str | None,
    mode: str,
    translate: Translate,
    undo: contextlib.ExitStack,
) -> None:
    *around, last = function.split(".")
    owner: Any = module
    for part in around:
        owner = getattr(owner, part, None)
    real = getattr(owner, last, None)
    if real is None:
        return

    @functools.wraps(real)
    def call(*args: Any, **named: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("mucudnn."):
            return real(*args, **named)  # the database of times, which ranks share
        asked = mode
        if mode == "mode":
            asked = str(named.get("mode", args[position + 1] if len(args) > position + 1 else "r"))
        if len(args) > position:
            args = (*args[:position], _own(args[position], asked, translate), *args[position + 1 :])
        elif name in named:
            named[name] = _own(named[name], asked, translate)
        return real(*args, **named)

    attribute = staticmethod(call) if isinstance(owner, type) and position == 0 else call
    undo.enter_context(substituted(owner, **{last: attribute}))


def _own(path: Any, mode: str, translate: Translate) -> Any:
    """The argument of a library with this rank's path, or paths, in the place of the program's."""
    if isinstance(path, list | tuple):
        return [_own(each, mode, translate) for each in path]
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    if not text or text.startswith(("file:", ":memory:")):
        return path
    return translate(text, "x" if mode == "w-" else mode)


class _Finder(importlib.abc.MetaPathFinder):
    """Calls what is to be done with a module, by its name, when it has been imported."""

    def __init__(self, takes: Mapping[str, Callable[[ModuleType], object]]) -> None:
        self._takes = takes
        self._finding: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._takes or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._takes[name](module)

        loader.exec_module = exec_module
        return spec
