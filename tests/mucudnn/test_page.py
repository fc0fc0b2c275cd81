"""The page of `report --html`: one file, with all that the tables say."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_report import DIVIDED, STOCK

from mucudnn.__main__ import main
from mucudnn.optimizer import Option
from mucudnn.reporting.run_file import Moment, Outcome
from mucudnn.timing.store import Store


class Read(HTMLParser):
    """The texts of a page by the innermost element, and the elements that are open at its end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and text.strip():
            self.texts.setdefault(self.open[-1], []).append(text.strip())


def test_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plans, written = tmp_path / "plans.json", tmp_path / "page.html"
    outcome = Outcome([DIVIDED, STOCK], [Moment("a", 100, 20, 30.0)], ["a < b"])
    plans.write_text(json.dumps(outcome.to_json()))
    assert main(["report", str(plans), "--html", str(written)]) == 0
    text = written.read_text()
    read = Read(text)
    assert not read.open and text.count("<svg") == 2
    assert "4xfft(16) + gemm(3)" in read.texts["td"] and "a < b" in read.texts["p"]
    assert any("2 convolutions, 1 of them divided" in part for part in read.texts["p"])
    fetched = re.findall(r'(?:src|href)="([^"#]+)', text)
    assert fetched == [], "nothing is fetched when the page is read"
    # 10 ms of 40 ms: the bar that is filled is a quarter of the outline.
    widths = [float(width) for width in re.findall(r'<rect x="330"[^>]* width="([\d.]+)"', text)]
    assert widths[0] == pytest.approx(widths[1] / 4, rel=0.01) and widths[2] == widths[3]


def test_a_database(tmp_path: Path, own_database: Path) -> None:
    key = {**DIVIDED.problem.launch_key(), "device": "cpu a", "threads": 2}
    Store(str(own_database)).record(key, [Option(2, "fft", 0.004, 1 << 20)])
    assert main(["report", "--html", str(tmp_path / "page.html")]) == 0
    read = Read((tmp_path / "page.html").read_text())
    assert not read.open and "2.000" in read.texts["td"]


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--html", str(tmp_path / "missing" / "page.html")])
    assert "cannot write --html" in capsys.readouterr().err
