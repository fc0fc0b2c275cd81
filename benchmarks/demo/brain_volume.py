"""Trains a 3-D U-Net to find grey and white matter in the whole MNI152 T1 template, a volume per step.

Every fourth block of 8 mm of axial slices is held out: its voxels count in no loss. The volume carries fresh noise at
every step; the targets are the template's tissue probabilities. Printed at the end: Dice on the held-out slices,
beside the best that two intensity thresholds reach there, the median seconds of a step, and the peak tensor memory of
a step. Runs with one seed give the same numbers.

With --write FILE.h5 or FILE.zarr the volumes with their noise, eight of them, are written there and nothing is trained;
with --data FILE they are read from there, shuffled, in place of noise drawn at every step.

A picture needs the whole prediction in one place. Save the weights of a training with --save, and draw from them with
--load FILE --steps 0 --picture FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import brain
import torch
import torch.nn.functional as F
from brain_files import batches, write
from torch import Tensor
from unet3d import UNet3d


def volume(size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The template averaged to a size: T1 (1, 1, *size) and class probabilities (1, 3, *size)."""
    t1, probabilities = brain.template()
    whole = F.interpolate(torch.cat([t1[None], probabilities])[None], size=size, mode="area")
    return whole[:, :1].contiguous(), whole[:, 1:].contiguous()


def peak_tensor_bytes(step: Callable[[], None], device: str) -> int:
    """Most bytes that tensors made during the step held at one time, beyond those that were there before it.

    On the CPU the profiler's record of every allocation and release is summed up.
    """
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler else prints lines of its own among the program's
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def size_of(text: str) -> tuple[int, ...]:
    """ "40x48x40" or "full"."""
    if text == "full":
        return brain.BOX
    try:
        size = tuple(int(part) for part in text.split("x"))
    except ValueError:
        size = ()
    if len(size) != 3 or min(size) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not depth x height x width, such as 80x96x80, nor full")
    return size


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps (default %(default)s)")
    size = (
        f"voxels along depth, height, width of {'x'.join(map(str, brain.BOX))} mm; full is 1 mm (default %(default)s)"
    )
    parser.add_argument("--size", type=size_of, default="64x80x64", help=size)
    parser.add_argument("--width", type=int, default=8, help="channels of the first convolution (default %(default)s)")
    parser.add_argument("--levels", type=int, default=3, help="resolutions of the U-Net (default %(default)s)")
    parser.add_argument("--norm", choices=("group", "batch"), default="group", help="(default %(default)s)")
    parser.add_argument("--write", metavar="FILE", help="write volumes with noise there, HDF5 or .zarr")
    parser.add_argument("--data", metavar="FILE", help="train on volumes that --write wrote")
    parser.add_argument("--load", metavar="FILE", help="start from weights that --save wrote")
    parser.add_argument("--save", metavar="FILE", help="write the weights there after training")
    brain.add_arguments(parser, noise=0.15)
    chosen = parser.parse_args()
    if chosen.steps < 0:
        brain.stop(f"--steps {chosen.steps}: negative")
    brain.check_positive(chosen, "width", "levels")
    if any(length % 2 ** (chosen.levels - 1) for length in chosen.size):
        shape = "x".join(map(str, chosen.size))
        brain.stop(f"--size {shape}: not multiples of {2 ** (chosen.levels - 1)}, which --levels {chosen.levels} needs")
    if chosen.norm == "group" and chosen.width % 4:
        brain.stop(f"--width {chosen.width}: not a multiple of 4, which --norm group needs")
    if chosen.load and not Path(chosen.load).is_file():
        brain.stop(f"--load {chosen.load}: no such file")
    return chosen


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)

    image, probabilities = volume(options.size)
    truth = probabilities.argmax(1)
    out = brain.held_out(options.size[0])[:, None, None]
    noisy = brain.with_noise(image, options.noise, generator)
    baseline = brain.threshold_dice(noisy[:, 0], truth, ~out, out)
    # Probabilities of zero add nothing to the cross entropy: so held-out voxels count in no loss.
    targets = torch.where(out, 0.0, probabilities).to(options.device, dtype)

    if options.write:
        write(Path(options.write), image, torch.where(out, 0.0, probabilities), options.noise, generator)
        return

    model = UNet3d(width=options.width, levels=options.levels, norm=options.norm).to(options.device, dtype)
    if options.load:
        model.load_state_dict(torch.load(options.load, map_location=options.device))
    shape = "x".join(map(str, options.size))
    print(f"{shape} voxels, {int(out.sum())} of {options.size[0]} axial slices held out")

    volumes = batches(Path(options.data), options.size) if options.data else None

    def draw_volume() -> tuple[Tensor, Tensor]:
        if volumes is not None:
            inputs, theirs = next(volumes)
            return inputs.to(options.device, dtype), theirs.to(options.device, dtype)
        return brain.with_noise(image, options.noise, generator).to(options.device, dtype), targets

    losses, seconds = brain.train(model, options.rate, options.steps, draw_volume)

    def one_more() -> None:
        inputs, wanted = draw_volume()
        loss = F.cross_entropy(model(inputs), wanted)
        loss.backward()
        print(f"loss after training {loss.item():.6f}")

    peak = None
    if options.steps:
        model.zero_grad()
        peak = peak_tensor_bytes(one_more, options.device)
        model.zero_grad()
    if options.save:
        partial = f"{options.save}.{os.getpid()}"
        torch.save(model.state_dict(), partial)
        os.replace(partial, options.save)

    model.eval()
    overlap = brain.Overlap()
    with torch.no_grad():
        predicted = model(noisy.to(options.device, dtype)).argmax(1)
    overlap.add(predicted, truth.to(options.device), out.to(options.device))
    brain.report(options, losses, seconds, overlap.dice(), baseline, peak_tensor_bytes=peak)
    if options.picture:
        candidates = out.flatten().nonzero().flatten()
        shown = int(candidates[len(candidates) // 2])
        panels = [
            ("T1 with noise", noisy[0, 0, shown]),
            ("truth", truth[0, shown]),
            ("prediction", predicted[0, shown].cpu()),
        ]
        brain.draw(options.picture, f"Held-out axial slice {shown} of the MNI152 template", panels)


if __name__ == "__main__":
    main()
