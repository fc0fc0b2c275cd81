"""The private names of torch that mucudnn uses, and the check that a torch has them.

Torch may change such names in any release. The check runs before anything else, so that a torch without one of them
gives an error of one line. A missing name that some features alone need turns these off: they raise a one-line error
when they are used, and the rest works. Operators are not private names: whatever registers a kernel for one names it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

TESTED = ("2.11", "2.14.1")
"""The oldest and the newest release of torch under which tests have passed; docs/index.md says which."""


class MissingName(ImportError):
    """This torch lacks a name that a package needs; the message is one line."""


class Name(NamedTuple):
    """A private name of torch."""

    path: str
    """Of its modules and attributes. An attribute of instances follows their class, an attribute of a function's
    result follows that function."""
    why: str  # Its use.
    since: str = TESTED[0]  # The first tested release that has it; an older one is not asked.
    cuda: bool = False  # Only a torch that is built for CUDA has it.
    features: tuple[str, ...] = ()  # Those that are off without it; empty where nothing works without.


GPUS, STEPS, NETWORKS, ONEDNN, UNPATCHED = (
    "cuDNN's convolutions",
    "a limit by measured memory",
    "the layers of a network",
    "oneDNN's algorithms",
    "mucudnn.unpatch",
)
"""Features that may be off."""


def needed_by(features: Sequence[str], *names: Name) -> tuple[Name, ...]:
    """Names that these features alone need."""
    return tuple(name._replace(features=tuple(features)) for name in names)


_SETTING = "which settings of torch a time depends on, asked at every call"

NAMES = (
    Name("torch._C.DisableTorchFunction", "torch's convolution of a subclass of tensors, without its functions"),
    Name("torch._C.DispatchKey", "the kernel of torch itself, below the one that is called first"),
    Name("torch._C.DispatchKeySet", "the kernel of torch itself, below the one that is called first"),
    Name("torch._C._AutoDispatchBelowAutograd", "the parts of a convolution run beneath autograd"),
    Name("torch._C._ExcludeDispatchKeyGuard", "the parts of a convolution run beneath autocast"),
    Name("torch._C._get_fp32_precision_getter", _SETTING),
    Name("torch._C._get_mkldnn_enabled", _SETTING),
    Name("torch._C._select_conv_backend", "which of its kernels torch would take for a convolution"),
    Name("torch._convolution", "torch's convolution under the settings that the caller names"),
    Name("torch._ops.OpOverload._handle", "torch's own kernel is called by the dispatcher in a twelfth less time"),
    *needed_by(
        (GPUS,),
        Name("torch._C._cuda_getCurrentRawStream", "the stream that cuDNN's launches go to", cuda=True),
        Name("torch._C._cuda_getDevice", "the current GPU, in less than half the time", cuda=True),
        Name("torch._C._dynamo.guards._empty_strided_cuda", "memory on the current GPU, in half the time", cuda=True),
        Name("torch._C._get_cudnn_benchmark", _SETTING),
        Name("torch._C._get_cudnn_deterministic", _SETTING),
        Name("torch._C._get_cudnn_enabled", _SETTING),
        Name("torch._C._get_deterministic_algorithms", _SETTING),
        Name("torch.cuda._sleep", "a GPU is busy when a time begins", cuda=True),
    ),
    *needed_by((STEPS,), Name("torch._C._autograd._profiler_enabled", "no step is recorded beside another profile")),
    *needed_by((ONEDNN,), Name("torch._mkldnn", "the layout of oneDNN's tensors")),
    *needed_by((UNPATCHED,), Name("torch.library.Library._destroy", "the kernels before torch's own are taken away")),
    *needed_by(
        (NETWORKS,), Name("torch.utils._python_dispatch.TorchDispatchMode", "the convolutions that a network calls")
    ),
)
"""What mucudnn needs."""


@functools.cache
def check_names() -> None:
    """Asks this torch for every name that mucudnn needs, once in a process; MissingName for one that it lacks."""
    demand("mucudnn", NAMES)


def demand(package: str, names: Sequence[Name]) -> None:
    """Asks this torch, which is imported if it is not yet, for the names that a package needs.

    Missing names that features alone need are replaced by substitutes, which can be imported and raise when used.

    Raises:
        MissingName: for the others that it lacks.
    """
    missing = _missing(names)
    if paths := [name.path for name in missing if not name.features]:
        raise MissingName(_line(package, paths))
    for name in missing:
        _stand_in(name.path, _line(name.features[0], [name.path]))


def reason_off(feature: str, names: Sequence[Name] = NAMES) -> str:
    """Why a feature is off, in one line; empty where torch has all that it needs."""
    paths = [name.path for name in _missing(names) if feature in name.features]
    return _line(feature, paths) if paths else ""


def require_feature(feature: str) -> None:
    """MissingName where a feature is off."""
    if line := reason_off(feature):
        raise MissingName(line)


def _missing(names: Sequence[Name]) -> list[Name]:
    torch = importlib.import_module("torch")
    asked = [name for name in names if torch.__version__ >= name.since and (torch.version.cuda or not name.cuda)]
    return [name for name in asked if not _was_there(name.path)]


def _line(who: str, paths: Sequence[str]) -> str:
    version = importlib.import_module("torch").__version__
    return (
        f"{who} needs {', '.join(paths)}, which torch {version} does not have; tested are torch {' to '.join(TESTED)}"
    )


@functools.cache
def _was_there(path: str) -> bool:
    """Whether torch had a name when it was first asked for it: later it has what we replace."""
    return is_there(path)


class _StandIn(type):
    """The metaclass of a missing name's substitute: nothing is an instance of it, and each use raises an error."""

    line: str

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise MissingName(cls.line)

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else MissingName(cls.line)


def _stand_in(path: str, line: str) -> None:
    """Members of classes, and of modules that torch has not imported, have none: nothing of ours names them sooner."""
    place, _, name = path.rpartition(".")
    if place in sys.modules:
        setattr(sys.modules[place], name, _StandIn(name, (BaseException,), {"line": line}))  # for `except`, too


def is_there(path: str) -> bool:
    """Whether torch has a name.

    A module that takes long to import, such as a compiler's, is not imported for that: the text of its file is read.
    """
    first, *parts = path.split(".")
    owner: Any = sys.modules[first]
    for at, part in enumerate(parts, 1):
        inner = ".".join((first, *parts[:at]))
        if type(owner) is not ModuleType:  # a module's own __getattr__ may import
            if not hasattr(owner, part):
                return at == len(parts) and part in _given(owner)
            owner = getattr(owner, part)
        elif inner in sys.modules:
            owner = sys.modules[inner]
        elif part in vars(owner):
            owner = vars(owner)[part]
        else:
            return _is_written(getattr(owner, "__path__", ()), parts[at - 1 :])
    return True


def _given(owner: Any) -> set[str]:
    """Attributes that a class gives to its instances, or a function to what it returns."""
    if isinstance(owner, FunctionType):
        return set(owner.__code__.co_names)
    classes = [kind for kind in owner.__mro__ if kind is not object] if isinstance(owner, type) else []
    begins = [kind.__dict__.get("__init__") for kind in classes]
    annotated = {name for kind in classes for name in inspect.get_annotations(kind)}
    return annotated.union(*(begin.__code__.co_names for begin in begins if isinstance(begin, FunctionType)))


def _is_written(folders: Iterable[str], parts: Sequence[str]) -> bool:
    """Whether a module in one of the folders, the first of the parts, has a file that names the others."""
    spec = PathFinder.find_spec(parts[0], list(folders))
    if spec is None or spec.origin is None:
        return False
    inner = spec.submodule_search_locations
    if inner and len(parts) > 1 and PathFinder.find_spec(parts[1], inner):
        return _is_written(inner, parts[1:])
    return all(name in _words(spec.origin) for name in parts[1:])


@functools.lru_cache(maxsize=16)
def _words(file: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", Path(file).read_text()))
