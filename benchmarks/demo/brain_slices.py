"""Trains a network with 31x31 kernels to find grey and white matter in axial slices of the MNI152 T1 template.

Every fourth block of 8 mm is held out. The slices carry fresh noise at every step; the targets are the template's
tissue probabilities. Printed at the end: Dice on the held-out slices, beside the best that two intensity thresholds
reach there, and the median seconds of a step. Runs with one seed give the same numbers.
"""

from __future__ import annotations

import argparse

import brain
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 192
"""Millimetres along a side of the square slice."""


class LargeKernelBlock(nn.Module):
    """Adds to x what a dense convolution with a large kernel finds around each pixel."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.convolution(x)))


def small_kernel(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def network(width: int, kernel: int) -> nn.Sequential:
    """From T1 (N, 1, H, W) to class scores (N, 3, H, W)."""
    return nn.Sequential(
        small_kernel(1, width),
        small_kernel(width, width),
        LargeKernelBlock(width, kernel),
        LargeKernelBlock(width, kernel),
        small_kernel(width, width),
        nn.Conv2d(width, 3, 1),
    )


def axial_slices(size: int) -> tuple[Tensor, Tensor]:
    """All slices of the template: T1 (160, 1, size, size) and class probabilities (160, 3, size, size)."""
    t1, probabilities = brain.template()
    margin = [(SIDE - t1.shape[2]) // 2] * 2 + [(SIDE - t1.shape[1]) // 2] * 2
    slices = F.pad(torch.cat([t1[None], probabilities]), margin).transpose(0, 1)
    slices = F.interpolate(slices, size=(size, size), mode="area")
    t1, tissue = slices[:, :1].contiguous(), slices[:, 2:]
    return t1, torch.cat([1 - tissue.sum(1, keepdim=True), tissue], 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps (default %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="slices per step (default %(default)s)")
    parser.add_argument(
        "--size", type=int, default=64, help=f"pixels along a side of {SIDE} mm; {SIDE} is 1 mm (default %(default)s)"
    )
    parser.add_argument("--width", type=int, default=12, help="channels of every layer (default %(default)s)")
    parser.add_argument("--kernel", type=int, default=31, help="side of the large kernels, odd (default %(default)s)")
    brain.add_arguments(parser, noise=0.1)
    chosen = parser.parse_args()
    brain.check_positive(chosen, "steps", "batch", "size", "width", "kernel")
    if chosen.kernel % 2 == 0:
        brain.stop(f"--kernel {chosen.kernel}: not odd")
    return chosen


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)

    images, probabilities = axial_slices(options.size)
    truth = probabilities.argmax(1)
    out = brain.held_out(len(images))
    noisy = brain.with_noise(images, options.noise, generator)
    baseline = brain.threshold_dice(noisy[:, 0], truth, ~out[:, None, None], out[:, None, None])
    trained, tested = (~out).nonzero().flatten(), out.nonzero().flatten()

    model = network(options.width, options.kernel).to(options.device, dtype)
    print(f"{len(trained)} slices to train on, {len(tested)} held out, {options.size}x{options.size} pixels")

    def draw_batch() -> tuple[Tensor, Tensor]:
        chosen = trained[torch.randint(len(trained), (options.batch,), generator=generator)]
        inputs = brain.with_noise(images[chosen], options.noise, generator).to(options.device, dtype)
        return inputs, probabilities[chosen].to(options.device, dtype)

    losses, seconds = brain.train(model, options.rate, options.steps, draw_batch)

    model.eval()
    overlap = brain.Overlap()
    shown = tested[len(tested) // 2].item()
    picture = None
    with torch.no_grad():
        for batch in tested.split(options.batch):
            predicted = model(noisy[batch].to(options.device, dtype)).argmax(1)
            overlap.add(predicted, truth[batch].to(options.device), torch.ones_like(predicted, dtype=torch.bool))
            if shown in batch:
                picture = predicted[batch == shown]
    brain.report(options, losses, seconds, overlap.dice(), baseline)
    if options.picture and picture is not None:
        panels = [("T1 with noise", noisy[shown, 0]), ("truth", truth[shown]), ("prediction", picture[0].cpu())]
        brain.draw(options.picture, f"Held-out axial slice {shown} of the MNI152 template", panels)


if __name__ == "__main__":
    main()
