"""One network of the campaign: trained for two steps in one process and on ranks, and all numbers compared."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import distconv.interface  # at once: ranks are forked from here
import mucudnn.patching
from benchmarks.campaign.layers import Shape
from benchmarks.campaign.networks import Case, draw, loss_of, network
from benchmarks.campaign.rounding import Results, differences, error_of, fingerprints
from benchmarks.drawn_times import drawn_times

STEPS = 2
TOLERANCE = 1e-9
"""The largest difference from one process in float64, relative to the largest element."""

NOISE, HALF_NOISE = 1e-13, 2.0**-8
"""How much the input and what layers make are changed, relatively, to see how far a network amplifies rounding. In
bfloat16 what layers make and its gradients, alone, and no more than rounding to it does."""

AMPLIFIED = 100.0
"""A difference below so many times that of a changed network counts as rounding."""

CHANGES = 16
"""So many changes are drawn, one after the other, until they explain a difference: of a number within rounding of where
a function has a kink, such as zero before a ReLU, each tells only one side."""

RATE = 1e-2
"""Of learning."""

EPSILON = 1e-3
"""What optimizers add to what they divide gradients by: with torch's 1e-8, steps magnify the rounding of tiny ones."""

HALF_FACTOR, HALF_FLOOR = 4.0, 2.0**-6
"""In bfloat16, what is allowed: so many times the error of the worse of two plain orders, and so much of the norm."""

SMALLEST, OF_A_LOSS = 0.25, 2.0**-24
"""A gradient in bfloat16 counts as no less than this share of the largest, which is no less than this of a loss: a
Fourier transform leaves rounding where others leave zero."""

Answer = dict[str, Any]
"""{"outcome": right, rounding, wrong, refused, crash, unable or idle; "said": what there is to say of it; ...}."""


def data(case: Case, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * case["seed"] + step)
    return torch.randn(case["shape"], dtype=torch.float64, generator=generator)


def plainest(case: Case) -> Case:
    """What one process computes: contiguous tensors, for of others torch 2.13 alone has some gradients wrong; eager."""
    return case | {"channels_last": False, "compiled": ""}


def train(
    case: Case,
    mesh: Any = None,
    dtype: torch.dtype | None = None,
    change: int | None = None,
    backwards: bool = False,
    in_turn: dict[str, Any] | None = None,
) -> Results:
    """All numbers of two optimizer steps: losses, gradients of input and parameters, and in the end the whole state.

    Args:
        mesh: to compute on; in one process if not given.
        dtype: to compute in, that of the case if not given; inputs and initial parameters are rounded as the case says.
        change: the number of a random change, of what each layer makes; not of bfloat16, also of the input and zeros.
        backwards: whether the samples come in the opposite order, so that sums over them are rounded otherwise.
        in_turn: the arguments of `distconv.in_turn`, where parts are computed in turn in one process.
    """
    plain, shape = network(case)  # outside the script: layers are called to learn their shapes
    if in_turn is not None:
        distconv.in_turn(plain, **in_turn)
    as_script = mesh is not None and case["way"] == "script"
    with distconv.distributed_script(mesh) if as_script else contextlib.nullcontext():
        return _trained(plain, shape, case, mesh, dtype or getattr(torch, case["dtype"]), change, backwards)


def _trained(
    plain: nn.Module, shape: Shape, case: Case, mesh: Any, dtype: torch.dtype, change: int | None, backwards: bool
) -> Results:
    rounded = getattr(torch, case["dtype"])
    plain.to(rounded).to(dtype).train(not case["evaluation"])
    half = rounded is torch.bfloat16
    if change is not None:
        _change(plain, change, half)
    noise = 0.0 if change is None or half else NOISE
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    ndim = len(case["shape"])
    if case["channels_last"]:
        for parameter in plain.parameters():  # not Module.to, which fails where a norm's weight has a dim less
            if parameter.dim() == ndim:
                parameter.data = parameter.data.contiguous(memory_format=formats[ndim])
    if case["frozen"]:
        for parameter in list(plain.parameters())[::2]:
            parameter.requires_grad_(False)
    by_hand = mesh is not None and case["way"] == "program"
    model = distconv.parallelize(plain, mesh) if by_hand else plain
    if case["compiled"]:
        model = torch.compile(model, backend=case["compiled"], dynamic=False)
    trained = [p for p in plain.parameters() if p.requires_grad]
    kind = "SGD" if half else case["optimizer"]
    settings = {"lr": RATE} if kind == "SGD" else {"lr": RATE, "eps": EPSILON}
    optimizer = getattr(torch.optim, kind)(trained, **settings) if trained else None
    compute_loss, targets = loss_of(case, shape, dtype)
    targets = targets.flip(0) if backwards else targets
    results: Results = {}
    for step in range(STEPS):
        if optimizer is not None:
            optimizer.zero_grad()
        for part in range(1 + case["accumulates"]):
            x = data(case, 10 * step + part).to(rounded).to(dtype) * (1 + noise)
            if case["channels_last"]:
                x = x.contiguous(memory_format=formats[ndim])
            x = (x.flip(0) if backwards else x).requires_grad_()
            given = x * 1.0  # a network may begin with a function in place
            y = model(distconv.shard(given, mesh) if by_hand else given)
            assert tuple(y.shape) == shape, f"{tuple(y.shape)} instead of {shape}"
            loss = compute_loss(distconv.gather(y) if by_hand else y, targets)
            loss.backward()
            results[f"loss {step}.{part}"] = torch.tensor(loss.item(), dtype=torch.float64)
            gradient = torch.zeros(()) if x.grad is None else x.grad
            results[f"input's gradient {step}.{part}"] = gradient.flip(0) if backwards and gradient.dim() else gradient
        gradients = {f"gradient of {n} {step}": p.grad for n, p in plain.named_parameters() if p.grad is not None}
        results |= {name: value.clone() for name, value in distconv.whole_state(gradients).items()}
        if optimizer is not None:
            optimizer.step()
    return {name: x.detach() for name, x in (results | dict(distconv.whole_state(plain.state_dict()))).items()}


def _change(model: nn.Module, number: int, half: bool) -> None:
    """Lets a model's layers make other numbers, by about what rounding makes of them."""
    generator = torch.Generator().manual_seed(number)

    def near(x: Tensor) -> Tensor:
        sizes = x.detach().abs()  # backward must not need x, which a function in place may change
        size = HALF_NOISE * sizes if half else NOISE * (1 + sizes)
        return (x + size * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1)).to(x.dtype)

    def changed(layer: nn.Module, given: Any, y: Tensor) -> Tensor:
        y = near(y)
        if half and y.requires_grad:
            y.register_hook(near)
        return y

    for layer in model.modules():
        if next(layer.children(), None) is None:
            layer.register_forward_hook(changed)


@contextlib.contextmanager
def surroundings(case: Case) -> Iterator[Any]:
    """mucudnn beneath, where the case says so."""
    # In half types oneDNN has kernels (seen with torch 2.13) that write beyond their memory for some small layers.
    torch.backends.mkldnn.set_flags(case["dtype"] != "bfloat16")
    if case["limit"] is None:
        yield None
        return
    settings = {"workspace_limit": case["limit"], "policy": case["policy"], "database": ":memory:", "progress": "off"}
    settings["planning"] = "ahead"  # the first step is divided
    with drawn_times(case["seed"]), mucudnn.patched(**settings) as session:
        yield session


class Rank:
    """What a rank answers."""

    def __init__(self) -> None:
        self._alone: tuple[Case | None, Results] = None, {}

    def draw(self, seed: int, compiled: str) -> tuple[Case, str]:
        """The case of a seed, and what torch raises for it in one process; on the first rank alone."""
        case = draw(seed)
        case["compiled"] = compiled or case["compiled"]
        return case, self.alone(case)

    def alone(self, case: Case) -> str:
        """Trains in one process and keeps the numbers; what torch raises, empty if nothing."""
        try:
            self._alone = case, train(plainest(case))
        except Exception as error:
            self._alone = None, {}
            return f"{type(error).__name__}: {error}"[:400]
        return ""

    def compiled_alone(self, case: Case) -> str:
        """What torch raises where one process compiles the case, empty if nothing."""
        try:
            for channels_last in sorted({False, case["channels_last"]}):
                _compiled(case, channels_last)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:400]
        return ""

    def compare(self, case: Case) -> Answer:
        """Trains on the ranks of the case; the first of them compares with one process."""
        mesh = distconv.init(
            case["partition"], ranks=range(case["ranks"]), device_type="cpu", channel_algorithm=case["algorithm"]
        )
        if dist.get_rank() >= case["ranks"]:
            return {"outcome": "idle"}
        divided = 0
        try:
            with surroundings(case) as session:
                found = train(case, mesh)
            if session is not None:
                divided = sum(len(r.parts) > 1 or r.parts[0][1] != "stock" for r in session.records())
        except distconv.UnsupportedOperation as error:
            return {"outcome": "refused", "said": str(error)[:400], "operator": error.operator, "why": error.why[:200]}
        except Exception as error:
            return {"outcome": "crash", "said": f"{type(error).__name__}: {error}"[:400]}
        finally:
            if case["compiled"]:
                torch._dynamo.reset()
        answer = {"outcome": "idle", "fingerprints": fingerprints(found), "divided": divided}
        return answer | (self.judged(case, found) if dist.get_rank() == 0 else {})

    def judged(self, case: Case, found: Results) -> Answer:
        """What becomes of the numbers that ranks have found, beside those of one process, which must be known."""
        assert self._alone[0] == case, "one process has not computed this case"
        expected = self._alone[1]
        if case["dtype"] == "bfloat16":
            return _judged_half(case, found, expected)
        errors = differences(found, expected)
        above = {name: error for name, error in errors.items() if not error <= TOLERANCE}
        if above and case["compiled"]:
            # Compiled, a checkpointed norm counts a step once in its running statistics; otherwise twice.
            beside = differences(found, _compiled(case))
            above = {name: error for name, error in above.items() if not beside.get(name, math.inf) <= TOLERANCE}
        for number in range(CHANGES if above else 0):
            changed = differences(train(plainest(case), change=number), expected)
            above = {name: error for name, error in above.items() if not error <= AMPLIFIED * changed.get(name, 0.0)}
            if not above:
                return {"outcome": "rounding", "error": max(errors.values())}
        return _told(above, max(errors.values()))


def _compiled(case: Case, channels_last: bool = False) -> Results:
    """What one process finds that compiles the case."""
    torch._dynamo.reset()
    try:
        return train(plainest(case) | {"compiled": case["compiled"], "channels_last": channels_last})
    finally:
        torch._dynamo.reset()


def _judged_half(case: Case, found: Results, first: Results) -> Answer:
    """Against float64, beside two plain orders of summation: of the samples forwards, and backwards.

    Of one sample these are the same, and where a number is within rounding of a function's kink neither may tell it;
    then beside plain networks of which what layers make is changed by no more than rounding does.
    """
    plain = plainest(case)
    exact, second = train(plain, dtype=torch.float64), train(plain, backwards=True)
    if found.keys() != first.keys():
        return {"outcome": "wrong", "said": f"{sorted(found.keys() ^ first.keys())} on one side only"}
    norms = {name: float(value.double().norm()) for name, value in exact.items()}
    finite = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
    shares = {name: 1.0 if "gradient" in name else OF_A_LOSS * name.startswith("loss") for name in finite}
    largest = max((shares[name] * norm for name, norm in finite.items()), default=0.0)
    # Some gradients are zero, such as a bias's before a norm: what rounding makes of them is as large as of others, and
    # steps carry it into the parameters.
    trained = {name.split()[2] for name in exact if name.startswith("gradient of ")}
    for name, norm in norms.items():
        if "gradient" in name:
            norms[name] = max(norm, SMALLEST * largest)
        elif name in trained:
            norms[name] = max(norm, STEPS * RATE * SMALLEST * largest)
    plain_errors = {name: max(error_of(each[name], exact[name]) for each in (first, second)) for name in exact}
    above, worst = {}, 0.0
    for name, value in exact.items():
        error = error_of(found[name], value)
        if found[name].shape == value.shape and not first[name].isfinite().all():
            # The half type overflows where float64 does not: no number is to be expected. Of what is no number in
            # float64 either, such as the mean of an empty batch, none may be found.
            if value.isfinite().all() or torch.equal(found[name].isfinite(), value.isfinite()):
                continue
            error = math.inf
        allowed = HALF_FACTOR * plain_errors[name] + HALF_FLOOR * norms[name]
        if not error <= allowed:
            above[name] = error
        worst = max(worst, error / (allowed or 1.0))
    for number in range(CHANGES if above else 0):
        # In the half type too: its kernels round what lies between, such as the deviation of a norm's few elements.
        changed = train(plain, dtype=None if number % 2 else torch.float64, change=number)
        above = {
            name: error
            for name, error in above.items()
            if not error <= HALF_FACTOR * error_of(changed[name], exact[name]) + HALF_FLOOR * norms[name]
        }
        if not above:
            return {"outcome": "rounding", "error": worst}
    return _told({name: error / (norms[name] or 1.0) for name, error in above.items()}, worst)


def _told(above: dict[str, float], worst: float) -> Answer:
    if not above:
        return {"outcome": "right", "error": worst}
    listed = ", ".join(f"{name}: {error:.3g}" for name, error in list(above.items())[:6])
    return {"outcome": "wrong", "said": f"{len(above)} differ, {listed}"[:400], "error": worst}
