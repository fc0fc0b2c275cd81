"""Where there is no cuDNN, or none is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mucudnn.providers.cudnn import library
from mucudnn.providers.cudnn.graph import Configuration
from mucudnn.providers.cudnn.library import Unavailable


def test_configurations_are_spelled_and_read() -> None:
    for configuration in (Configuration(0), Configuration(38, ((2, 8), (13, -1)))):
        assert Configuration.parsed(str(configuration)) == configuration
    assert str(Configuration(17, ((2, 3),))) == "eng17_k2=3"


def test_torch_without_cudnn_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    library.library.cache_clear()
    if not torch.backends.cudnn.is_available():
        with pytest.raises(Unavailable, match="is built without cuDNN"):
            library.library()
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(library, "loaded_files", lambda: ["/a/libcudnn.so.9", "/b/libcudnn.so.9"])
    with pytest.raises(Unavailable, match=r"2 copies of cuDNN are loaded.*: /a/libcudnn.so.9, /b/libcudnn.so.9"):
        library.library()
    library.library.cache_clear()


def test_importing_loads_no_cudnn() -> None:
    code = "import mucudnn, mucudnn.runtime.session, sys; print(any('cudnn.card' in name for name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
