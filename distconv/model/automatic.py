"""Chooses the mesh of a model that a program has made, and the partition of every layer."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distconv.model.choosing import (
    NothingChosen,
    Question,
    ask,
    environment_of_settings,
    first_line,
    on_all_ranks,
    ranks_here,
)
from distconv.model.strategy import Strategy
from distconv.tensors.mesh import MeshToChoose, channel_algorithms, make_mesh
from mucudnn.process import print_line


def choose(
    model: nn.Module, mesh: DeviceMesh | MeshToChoose, sample_input: Any, batch_norm: str, fully: bool | None
) -> tuple[DeviceMesh, Strategy | None, bool]:
    """Asks for a partition of every layer of a model.

    The first rank asks, and sends the answer to the others. A mesh that was given stays; one to be chosen is settled.

    Returns:
        The mesh of the model's own partition; the strategy of its layers, None where all run under that partition; and
        whether parameters are sharded along all axes.

    Raises:
        ValueError: one line, on every rank.
    """
    shapes = _shapes(sample_input)
    known = mesh.settled if isinstance(mesh, MeshToChoose) else mesh
    size = dist.get_world_size()
    if known is not None and known.size() != size:
        raise ValueError(f"strategy 'auto': the mesh has {known.size()} of {size} ranks; accepted: a mesh of all")
    algorithm = mesh.channel_algorithm if isinstance(mesh, MeshToChoose) else channel_algorithms.get(mesh)
    local = ranks_here()

    def asking() -> Any:
        with tempfile.TemporaryDirectory(prefix="distconv-model-") as folder:
            path = os.path.join(folder, "model.pickle")
            write_model(path, model, shapes)
            question = Question(
                "model", path, size, local, torch.get_num_threads(), batch_norm=batch_norm, may_be_one=False
            )
            return ask(question, **environment_of_settings(algorithm, fully))

    try:
        answer = on_all_ranks(asking)
    except NothingChosen as error:
        raise ValueError(f"strategy 'auto': {error}") from None
    if dist.get_rank() == 0:
        print_line(f"distconv: strategy auto: {answer.sentence}")
    strategy = Strategy.parse(answer.strategy, size)
    outer = strategy.outer
    assert outer is not None, "an answer has the pattern *"
    if known is None:
        assert isinstance(mesh, MeshToChoose)
        known = mesh.settled = make_mesh(outer, device_type=mesh.device_type)
        if algorithm is not None:
            channel_algorithms[known] = algorithm
    is_same = strategy.is_one_partition and make_mesh(outer, device_type=known.device_type) == known
    return known, None if is_same else strategy, answer.shard_parameters


def _shapes(sample_input: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes (N, C, spatial...) of the whole inputs, each given by a sample or by its shape."""
    is_one = hasattr(sample_input, "shape") or not isinstance(sample_input, Sequence) or _is_shape(sample_input)
    given = [getattr(each, "shape", each) for each in ([sample_input] if is_one else sample_input)]
    if not all(map(_is_shape, given)) or max(map(len, given), default=0) < 3:
        shown = given[0] if is_one else given
        accepted = "a whole input (N, C, ...), or its shape; of several, a list"
        raise ValueError(f"strategy 'auto': sample_input {shown}; accepted: {accepted}")
    return tuple(map(tuple, given))


def _is_shape(given: Any) -> bool:
    return isinstance(given, Sequence) and len(given) > 0 and all(type(n) is int and n > 0 for n in given)


def _without_data(file: IO[bytes]) -> Any:
    """A pickler that writes tensors to a file by their shapes, and classes of the program itself with their code."""
    import cloudpickle  # which nothing else of a job needs

    class WithoutData(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Tensor):
                is_parameter = isinstance(obj, nn.Parameter)
                return empty, (tuple(obj.shape), obj.stride(), obj.dtype, obj.requires_grad, is_parameter)
            return super().reducer_override(obj)

    return WithoutData(file)


def empty(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, wants_gradient: bool, is_parameter: bool
) -> Tensor:
    """A tensor without data."""
    found = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return nn.Parameter(found, wants_gradient) if is_parameter else found.requires_grad_(wants_gradient)


def write_model(path: str, model: nn.Module, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Writes a model without data, and the shapes of its inputs, for `read`.

    Raises:
        NothingChosen: for a model with what cannot be pickled.
    """
    with open(path, "wb") as file:
        pickle.dump((sys.path, shapes), file)
        try:
            _without_data(file).dump(model)
        except Exception as error:
            raise NothingChosen(f"{type(model).__name__} cannot be given to a process: {first_line(error)}") from None


def read_question(path: str) -> tuple[nn.Module, tuple[tuple[int, ...], ...]]:
    """Reads a written question: the model without data, and the shapes of its inputs.

    Raises:
        NothingChosen: for a model whose modules cannot be imported again.
    """
    with open(path, "rb") as file:
        sys.path[:], shapes = pickle.load(file)
        try:
            return pickle.load(file), shapes
        except Exception as error:
            raise NothingChosen(f"the model cannot be made in a process of its own: {first_line(error)}") from None
