from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from distconv.job.surroundings import starts_reported


def test_a_line_that_starts_a_program_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    with starts_reported():
        for _ in range(2):
            assert subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, check=True).stdout == b"3\n"
        assert os.popen("exit 0").close() is None
        assert os.system("exit 3") >> 8 == 3
        assert isinstance(platform.uname_result(*"abcde").processor, str)  # it calls uname
    assert os.system("exit 0") == 0
    by_list, by_text, by_system = capsys.readouterr().err.splitlines()
    assert f"test_started_processes.py:16: every rank starts {os.path.basename(sys.executable)}," in by_list
    assert "test_started_processes.py:17: every rank starts exit," in by_text
    assert "test_started_processes.py:18: every rank starts exit," in by_system
