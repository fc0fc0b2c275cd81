"""Builds the null card and runs a command with it.

    python tests/null_card/build.py PYTHON ARGUMENTS...    # PYTHON's torch is built for CUDA

The library is made by gcc from the C files beside this one, with the headers of NVIDIA's wheels, into build/ here. What
torch's libraries import and the C files lack is refused by generated functions; what libcudnn exports and they lack is
passed on to it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = sorted(HERE.glob("*.c"))
API = re.compile(r"^(?:API [\w ]*?[ *]+|(?:MADE|ACCEPTED|LAUNCHED)\()(\w+)[()]", re.MULTILINE)
"""A function that a C file defines for others, by itself or by a macro."""


def site_of(python: str) -> Path:
    """The folder of a Python's packages."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def symbols(library: Path, *options: str) -> set[str]:
    """Names of dynamic symbols, without versions."""
    command = ["nm", "--dynamic", *options, str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if " A " not in line}


def defined() -> set[str]:
    """What the C files define."""
    text = "\n".join(source.read_text() for source in SOURCES)
    made = {
        f"cudnn{before}{operation}{after}"
        for operation in ("Forward", "BackwardData", "BackwardFilter")
        for before, after in (
            ("Convolution", ""),
            ("GetConvolution", "WorkspaceSize"),
            ("FindConvolution", "AlgorithmEx"),
            ("GetConvolution", "Algorithm_v7"),
        )
    }
    return set(API.findall(text)) | made


def generated(site: Path) -> str:
    """The functions that are refused, the names that are passed on, and the card's properties, in C."""
    wanted = set().union(*(symbols(path, "--undefined-only") for path in (site / "torch/lib").glob("*.so")))
    own = defined()
    refused = {name for name in wanted if re.match(r"_*cuda[A-Z]|cublas", name)} - own
    passed_on = {name for name in symbols(cudnn(site), "--defined-only") if name.startswith("cudnn")} - own
    from_device = json.loads((HERE / "properties.json").read_text())
    lines = [f"#define CARD_PROPERTIES {json.dumps(json.dumps(from_device))}"]
    lines += ["#define FORWARDED " + " ".join(f"F({name})" for name in sorted(passed_on))]
    lines += ["#define REFUSALS " + " ".join(f"R({name})" for name in sorted(refused))]
    return "\n".join(lines) + "\n"


def cudnn(site: Path) -> Path:
    return site / "nvidia/cudnn/lib/libcudnn.so.9"


def built(site: Path) -> Path:
    """The library, made if need be."""
    texts = [*SOURCES, *sorted(HERE.glob("*.h")), HERE / "properties.json", HERE / "build.py"]
    name = sha256(b"".join(text.read_bytes() for text in texts) + str(site).encode()).hexdigest()[:16]
    folder = HERE / "build" / name
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "generated.h").write_text(generated(site))
        part = folder / f"{os.getpid()}.so"
        command = ["gcc", "-O3", "-g", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden", "-include", "generated.h"]
        # Sums of convolutions are made in any order, several at once, as this processor can.
        command += ["-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"]
        # NVIDIA's wheel lacks a folder that triton's, which torch needs too, has.
        headers = [site / "nvidia/cu13/include", site / "triton/backends/nvidia/include"]
        command += [f"-I{place}" for place in (folder, *headers)] + ["-o", str(part), *map(str, SOURCES)]
        # Whoever has loaded libcudnn by its name is to find this library.
        subprocess.run([*command, "-ldl", "-lpthread", "-Wl,-soname,libcudnn.so.9"], check=True)
        part.rename(library)
    return library


def environment(python: str) -> dict[str, str]:
    """What a process needs for the card, beside its own environment."""
    site = site_of(python)
    library = built(site)
    paths = {"LD_LIBRARY_PATH": library.parent, "PYTHONPATH": HERE / "plugin"}
    joined = {name: os.pathsep.join(filter(None, (str(path), os.environ.get(name)))) for name, path in paths.items()}
    return {"LD_PRELOAD": str(library), "NULL_CARD_CUDNN": str(cudnn(site)), **joined}


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment(sys.argv[1])})
