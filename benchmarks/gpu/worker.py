"""A process of benchmarks/gpu/gpu.py: reads requests, a JSON object per line, and prints an answer to each.

    CUDNN_CONV_WSCAP_DBG=64 python benchmarks/gpu/worker.py cuda:0

`layer`, then `call`: stock torch on a layer. `prepare`, then `steps`: training steps of a network, under mucudnn where
a limit is given.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mucudnn
from benchmarks.gpu.cases import PRECISIONS, Precision, layer_problem
from benchmarks.gpu.layers import free, through_torch
from benchmarks.gpu.timing import Clock, Here, clock_of, peak
from benchmarks.layers.layer import Layer
from benchmarks.networks import NETWORKS
from mucudnn.devices import device_of
from mucudnn.timing.measurement import synthetic_operands

WARM_UP = 3

BY_STEP_WARM_UP = 8
"""Four steps pass before budgets are known, and the next ones measure."""


class Training:
    """A network and a batch on the device."""

    def __init__(self, name: str, precision: Precision, device: torch.device) -> None:
        network = NETWORKS[name.removesuffix("-small")]
        if device.type != "cuda" or name != network.name:
            network = network.small()
        torch.manual_seed(0)
        self._model, self._loss = network.build().float().to(device), network.loss
        self._inputs, self._targets = (
            (tensor.float() if tensor.is_floating_point() else tensor).to(device)
            for tensor in network.sample(network.batch)
        )
        if precision.memory_format == "channels_last":
            memory_format = torch.channels_last if self._inputs.dim() == 4 else torch.channels_last_3d
            self._model = self._model.to(memory_format=memory_format)
            self._inputs = self._inputs.contiguous(memory_format=memory_format)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4, momentum=0.9)
        self._autocast: dict[str, Any] = {
            "device_type": device.type,
            "dtype": torch.float16 if precision.dtype == "float16" else torch.bfloat16,
            "enabled": precision.dtype in ("float16", "bfloat16"),
        }

    def step(self) -> None:
        self._optimizer.zero_grad()
        with torch.autocast(**self._autocast):
            loss = self._loss(self._model(self._inputs), self._targets)
        loss.backward()
        self._optimizer.step()


class Worker:
    """Answers requests."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock: Clock = clock_of(device)
        self._training: Training | None = None
        self._layer: Here | None = None

    def layer(self, layer: dict[str, Any], precision: str, direction: str) -> dict[str, Any]:
        """Warms up; the bytes that a call takes at its peak, None on the host."""
        PRECISIONS[precision].apply()
        free(self._device)
        shape = Layer(**{name: tuple(value) if isinstance(value, list) else value for name, value in layer.items()})
        problem = layer_problem(shape, precision, direction)
        self._layer = Here(through_torch(problem, synthetic_operands(problem, self._device)))
        self._layer.seconds(self._clock)
        return {"peak": peak(self._layer, self._device)}

    def call(self) -> dict[str, Any]:
        """Seconds of one call of the layer."""
        assert self._layer is not None
        return {"seconds": self._layer.seconds(self._clock)}

    def forget(self) -> dict[str, Any]:
        """Gives the layer's memory back."""
        self._layer = None
        free(self._device)
        return {}

    def prepare(
        self,
        network: str,
        precision: str,
        limit: int | str | None,
        database: str,
        benchmark: bool = True,
        channels_last: bool = False,
    ) -> dict[str, Any]:
        """Warms up; of mucudnn, also the seconds that measuring and then planning add to a first step.

        Torch's own search for the fastest kernels comes first and alone: its workspaces, as large as the device allows,
        are no part of what a step needs, so budgets by step must not see them.
        """
        arm = PRECISIONS[precision]
        if channels_last:
            arm = replace(arm, memory_format="channels_last")
        arm.apply()
        torch.backends.cudnn.benchmark = benchmark
        self._training = training = Training(network, arm, self._device)
        training.step()
        free(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        first = []
        for _ in range(1 if limit is None else 2):
            if limit is not None:
                mucudnn.patch(workspace_limit=limit, policy="powerOfTwo", database=database, progress="off")
            first.append(self._clock.seconds(training.step))
            for _ in range(BY_STEP_WARM_UP if limit == "peak" else WARM_UP):
                usual = self._clock.seconds(training.step)
        return {"first": [seconds - usual for seconds in first]}

    def steps(self, count: int) -> dict[str, Any]:
        """Seconds of each, the peak bytes of tensors meanwhile, and the bytes of this device in use that are not
        this process's tensors or torch's cache, so those of other processes, too; None on the host.
        """
        assert self._training is not None
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        times = [self._clock.seconds(self._training.step) for _ in range(count)]
        if not on_gpu:
            return {"seconds": times, "peak": None, "outside": None}
        most, outside = torch.cuda.max_memory_allocated(self._device), device_of(self._device).outside()
        return {"seconds": times, "peak": most, "outside": outside}

    def answer(self, do: str, **request: Any) -> dict[str, Any]:
        try:
            layers = {"layer": self.layer, "call": self.call, "forget": self.forget}
            return {**layers, "prepare": self.prepare, "steps": self.steps}[do](**request)
        except RuntimeError as error:  # out of memory among them
            free(self._device)
            return {"failed": (str(error) or repr(error)).splitlines()[0]}


def main() -> None:
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        worker = Worker(device)
        for line in sys.stdin:
            print(json.dumps(worker.answer(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
