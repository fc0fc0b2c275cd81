"""What reaches cuDNN: descriptors, addresses and sums over parts, on a simulated cuDNN, against stock torch."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems
from references import TOLERANCE, operands, reference, relative_error
from simulated_card import SimulatedCard

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction, Role
from mucudnn.convolution.tile import divided_dims, extent, tiles
from mucudnn.optimizer import Division, Option
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.form import form
from mucudnn.providers.cudnn.legacy import ALGORITHMS, Legacy
from mucudnn.timing.schedule import LaunchError, Schedule

FORMATS = st.sampled_from(["contiguous", "channels_last", "strided"])


def laid_out(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor in a memory format; strided is a view into a larger one."""
    if name == "channels_last":
        return tensor.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[tensor.dim()])
    if name == "strided":
        larger = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 1), float("nan"))
        larger[..., :-1] = tensor
        return larger[..., :-1]
    return tensor


@st.composite
def formatted(draw: st.DrawFn) -> ConvProblem:
    problem = draw(problems(dtypes=("float64", "float32", "bfloat16")))
    names = [draw(FORMATS) for _ in Role]
    if problem.dims == 1:
        names = ["contiguous" if name == "channels_last" else name for name in names]
    return replace(problem, formats=tuple(names))  # type: ignore[arg-type]


def run(
    problem: ConvProblem, given: Operands, provider: Engines | Legacy, algorithm: str, dim: Dim, parts: int
) -> None:
    whole = extent(problem, dim)
    size = -(-whole // min(parts, whole))
    sizes = [size] * (whole // size) + [whole % size] * (whole % size > 0)
    division = Division(tuple(Option(size, algorithm, 0.0, 0) for size in sizes), dim)
    Schedule(problem, division, {algorithm: provider}).run(given)


@settings(max_examples=150)
@given(formatted(), st.integers(1, 3), st.booleans(), st.booleans(), st.sampled_from(["eng0", "eng1", "legacy_fft"]))
def test_any_problem_in_any_division(
    problem: ConvProblem, parts: int, is_spatial: bool, with_bias: bool, algorithm: str
) -> None:
    card = SimulatedCard()
    provider = Legacy(card) if algorithm.startswith("legacy") else Engines(card)
    given_operands = operands(problem, with_bias=with_bias and problem.direction is Direction.FORWARD)
    tensors = {
        str(role): laid_out(getattr(given_operands, role), name)
        for role, name in zip(Role, problem.formats, strict=True)
    }
    given_operands = replace(given_operands, **tensors)
    dim = divided_dims(problem)[-1] if is_spatial else Dim.BATCH
    if not provider.serves(problem, algorithm):
        assert form(problem) is None or algorithm.startswith("legacy")
        return
    try:
        run(problem, given_operands, provider, algorithm, dim, parts)
    except LaunchError as error:
        assert dim is not Dim.BATCH and "cuDNN" in str(error.__cause__)  # a tile that cuDNN would not see so
        return
    actual = given_operands.target(problem)
    tolerance = TOLERANCE[problem.dtype] * (4 if problem.is_half else 1)  # each part's own rounding, and the sum's
    assert relative_error(actual, reference(problem, given_operands)) <= tolerance
    assert card.simulated.executed and set(card.simulated.executed) == {algorithm}


PLAIN = ConvProblem.of_convolution(
    Direction.FORWARD, (6, 3, 9, 9), (4, 3, 3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("sizes", [(6,), (4, 2)])
def test_operands_in_other_formats_are_copied_by_ready_launches(
    direction: Direction, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the gradient of what was concatenated; each algorithm copies the part that it computes, or the whole."""
    sources = [role for role in Role if role is not replace(PLAIN, direction=direction).target]
    formats = tuple("strided" if role in sources else "contiguous" for role in Role)
    problem = replace(PLAIN, direction=direction, formats=formats)
    tensors = operands(problem, with_bias=direction is Direction.FORWARD)
    given = replace(tensors, **{str(role): laid_out(getattr(tensors, role), "strided") for role in sources})
    engines = Engines(SimulatedCard())
    monkeypatch.setattr(engines, "launch", lambda *_: pytest.fail("nothing was ready"))
    options = tuple(Option(size, f"eng{number}", 0.0, 0) for number, size in enumerate(sizes))
    Schedule(problem, Division(options), {option.algorithm: engines for option in options}).launch(given)
    assert relative_error(given.target(problem), reference(problem, given)) <= TOLERANCE["float32"]


@pytest.fixture
def ieee() -> Iterator[Callable[[], None]]:
    """Forbids TF32, until the end of the test."""
    before = torch.backends.cudnn.conv.fp32_precision

    def forbid() -> None:
        torch.backends.cudnn.conv.fp32_precision = "ieee"

    yield forbid
    torch.backends.cudnn.conv.fp32_precision = before


def test_engines_are_filtered_as_torch_filters_them(monkeypatch: pytest.MonkeyPatch, ieee: Callable[[], None]) -> None:
    engines = Engines(SimulatedCard())
    assert engines.algorithms(PLAIN) == ("eng1", "eng2", "eng3", "eng0")
    assert "narrower" in engines.refused(PLAIN)["eng4"]
    ieee()
    assert engines.algorithms(PLAIN) == ("eng1", "eng2", "eng0")
    assert "TF32" in engines.refused(PLAIN)["eng3"]
    assert engines.algorithms(replace(PLAIN, dtype="float16")) == ("eng1", "eng2", "eng3", "eng0")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert engines.algorithms(PLAIN) == ("eng1", "eng0")
    assert "deterministic" in engines.refused(PLAIN)["eng2"]
    assert Engines(SimulatedCard(), every=True).refused(PLAIN)["eng5"].endswith("engine 5 serves nothing")


def test_the_older_functions_are_filtered_as_torch_filters_them(monkeypatch: pytest.MonkeyPatch) -> None:
    legacy = Legacy(SimulatedCard())
    gradient = replace(PLAIN, direction=Direction.BACKWARD_FILTER)
    assert set(legacy.algorithms(gradient)) == {f"legacy_{name}" for name in ALL_FILTER}
    assert "legacy_winograd" not in legacy.algorithms(PLAIN)  # the simulated card refuses it
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert set(legacy.algorithms(gradient)) == {f"legacy_{name}" for name in ALL_FILTER - {"0", "3"}}


def test_older_functions_that_are_not_offered_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Legacy(SimulatedCard()).refused(PLAIN) == {
        "legacy_winograd": "cudnnGetConvolutionForwardWorkspaceSize: cuDNN status 3000: not on this card"
    }
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    refused = Legacy(SimulatedCard()).refused(replace(PLAIN, direction=Direction.BACKWARD_FILTER))
    assert refused["legacy_0"] == refused["legacy_3"] == "it is not deterministic"
    lopsided = next(tile.problem for tile in tiles(PLAIN, divided_dims(PLAIN)[-1], (4, 5)))
    assert set(Legacy(SimulatedCard()).refused(lopsided)) == {f"legacy_{name}" for name in ALGORITHMS[Role.Y]}


ALL_FILTER = {"0", "1", "fft", "3", "winograd_nonfused", "fft_tiling"}


def test_an_erratum_excludes_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = {"rule_id": "r", "engine": 1, "knob": [], "cudnn_version_start": 8000}
    for name, operation, last, excluded in (
        ("a", "ConvFwd", -1, True),
        ("b", "ConvBwdData", -1, False),
        ("c", "ConvFwd", 9000, False),
    ):
        path = tmp_path / f"{name}.json"
        rules = [{**rule, "operation": operation, "cudnn_version_end": last}]
        path.write_text(json.dumps({"version": 1, "rules": rules}))
        monkeypatch.setenv("CUDNN_ERRATA_JSON_FILE", str(path))
        engines = Engines(SimulatedCard())
        assert ("eng1" not in engines.algorithms(PLAIN)) == excluded
        assert (engines.refused(PLAIN).get("eng1") == "erratum r") == excluded


def test_workspace_is_that_of_the_largest_part_and_asked_for_once() -> None:
    card = SimulatedCard()
    engines = Engines(card)
    given_operands = operands(PLAIN)
    division = Division(tuple(Option(size, "eng1", 0.0, 0) for size in (3, 2, 1)))
    Schedule(PLAIN, division, {"eng1": engines}).run(given_operands)
    assert card.scratches == [3 * 1024]
    assert engines.workspace(PLAIN.with_extent(3), "eng1") == 3 * 1024
    assert card.simulated.executed == ["eng1"] * 3


def test_plans_and_variant_packs_are_made_once() -> None:
    card = SimulatedCard()
    engines = Engines(card)
    given_operands = operands(PLAIN)
    division = Division(tuple(Option(2, "eng0", 0.0, 0) for _ in range(3)))
    schedule = Schedule(PLAIN, division, {"eng0": engines})
    schedule.run(given_operands)
    live = card.simulated.live
    for _ in range(5):
        schedule.run(given_operands)
    assert card.simulated.live == live
    assert len(card.simulated.executed) == 18


def test_descriptors_are_freed() -> None:
    card = SimulatedCard()
    engines, legacy = Engines(card), Legacy(card)
    given_operands = operands(PLAIN)
    run(PLAIN, given_operands, engines, "eng1", Dim.BATCH, 2)
    run(PLAIN, given_operands, legacy, "legacy_fft", Dim.BATCH, 2)
    before = card.simulated.live
    del engines, legacy
    gc.collect()
    # What the heuristic made by itself stays: the simulated one does not free it.
    assert card.simulated.live < before


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_addresses_at_odd_offsets_get_plans_of_their_own(dtype: str) -> None:
    card = SimulatedCard()
    engines = Engines(card)
    problem = replace(PLAIN, x_shape=(6, 3, 7, 7), y_shape=(6, 4, 7, 7), dtype=dtype)
    alignments = [tile.problem.alignment for tile in tiles(problem, Dim.BATCH, (1, 4, 1))]
    assert alignments == ([16, 4, 4] if dtype == "float32" else [16, 2, 2])
    even = replace(PLAIN, x_shape=(6, 4, 8, 8), y_shape=(6, 4, 8, 8), w_shape=(4, 4, 3, 3), dtype=dtype)
    assert {tile.problem.alignment for tile in tiles(even, Dim.BATCH, (1, 4, 1))} == {16}
    given_operands = operands(even)
    storage = torch.empty(given_operands.x.numel() + 1, dtype=given_operands.x.dtype)
    shifted = storage[1:].view(even.x_shape).copy_(given_operands.x)
    given_operands = replace(given_operands, x=shifted)
    run(even, given_operands, engines, "eng0", Dim.BATCH, 2)
    assert relative_error(given_operands.y, reference(even, given_operands)) <= TOLERANCE[dtype]


def test_a_failure_names_the_algorithm_and_cudnns_words() -> None:
    card = SimulatedCard()
    card.simulated.failing.add("eng1")
    with pytest.raises(LaunchError, match=r"eng1.*status 5000: eng1 was told to fail"):
        run(PLAIN, operands(PLAIN), Engines(card), "eng1", Dim.BATCH, 2)
