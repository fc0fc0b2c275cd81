"""python -m distconv convert: copies volumes into a format of which every rank can read its part."""

from __future__ import annotations

import argparse
import math
from typing import Any

from distconv.job.launcher import BadInput
from distconv.settings.partition import Partition

BRIEF = "copy volumes into a format that ranks read in parts"
DESCRIPTION = """\
Copies arrays into a folder of Zarr, once: in chunks of which no two ranks read the same, compressed, each with a
checksum.

SOURCE is an HDF5 file, a folder of Zarr, a .npy, .nii or .nii.gz file, or a folder of such files, which becomes one
array with a sample per file, in the order of their names. The dims of a NIfTI file stay in its order.
"""
EPILOG = """\
examples:
  python -m distconv convert volumes.h5 volumes.zarr --partition depth=4
"""


def add_options(parser: Any) -> None:
    """Adds the options of the command."""
    parser.add_argument("source", metavar="SOURCE", help="the file or folder")
    parser.add_argument("target", metavar="TARGET.zarr", help="the folder to make")
    parser.add_argument("--key", default="", help="the array of an HDF5 or Zarr source (default: all of an HDF5 file)")
    parser.add_argument(
        "--partition",
        metavar="AXIS=RANKS,...",
        help="the partition that the chunks suit (default: chunks of at most 64 elements along every dim of space)",
    )


def command(options: argparse.Namespace) -> int:
    """Converts; the exit code. BadInput, one line, for what cannot be read or written."""
    try:
        import zarr  # noqa: F401
    except ImportError:
        raise BadInput("convert needs zarr: pip install 'zarr>=3'") from None
    from tqdm import tqdm

    from distconv.reading.conversion import convert, originals

    try:
        partition = Partition.parse(options.partition) if options.partition else None
        found = originals(options.source, options.key)
        size = sum(math.prod(each.shape) * each.dtype.itemsize for each in found)
        with tqdm(total=size, unit="B", unit_scale=True, unit_divisor=1024, desc=options.target) as bar:
            written = convert(found, options.target, partition, bar.update)
    except ImportError as error:
        raise BadInput(f"{options.source}: {error}") from None
    except (OSError, ValueError) as error:
        raise BadInput(" ".join(str(error).split())) from None
    for name, shape, chunks in written:
        print(f"{options.target}: {name}, {shape}, chunks {chunks}")
    return 0
