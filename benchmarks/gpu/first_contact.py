"""The first minutes on a GPU: questions that only a card can answer, each answered in a line.

    python benchmarks/gpu/first_contact.py                 # at most 5 minutes; run it again for what is left
    python benchmarks/gpu/first_contact.py --ask engines   # one question again
    python benchmarks/gpu/first_contact.py --device cpu    # tries the script; most questions need a GPU

Each answer is in first-contact-<card>.md and .json in the folder of results as soon as it is known, so whatever ends a
run leaves the answers before it. A process of its own answers: where it dies or takes too long, the question has that
for its answer, and another process goes on with the next. What failed is asked again when the script is run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.process import Failed, Process

RESULTS = Path("benchmarks/results")

SECONDS = {
    **{"properties": 30, "engines": 60, "older": 45, "sums": 60, "caps": 120, "host": 30, "graph": 45, "threads": 45},
    **{"finalizing": 75, "best": 60, "nccl": 90},
}
"""Every question, what decides most coming first, with the seconds after which it is given up."""

ORDER = tuple(SECONDS)

START_SECONDS = 90.0
"""That the process may take to import torch and to find the card."""

Entry = dict[str, Any]


class Answers:
    """The answers about one card, on the files whenever there is one more.

    Attributes:
        about: device and versions.
        entries: by question: its text, the answer, the figure, and whether it failed.
    """

    def __init__(self, folder: Path, about: dict[str, str]) -> None:
        self.about = about
        slug = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
        self._path = folder / f"first-contact-{slug}"
        self.entries: dict[str, Entry] = {}
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            content = json.loads(self.markdown_path.with_suffix(".json").read_text())
            if content["about"] == about:  # another torch or cuDNN is another card as far as this is concerned
                self.entries = content["entries"]

    @property
    def markdown_path(self) -> Path:
        return self._path.with_name(self._path.name + ".md")

    def add(self, name: str, entry: Entry) -> None:
        """Keeps an answer, on the files before this returns."""
        self.entries[name] = entry
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"about": self.about, "entries": self.entries}, indent=1) + "\n"
        for path, text in ((self.markdown_path.with_suffix(".json"), content), (self.markdown_path, self.markdown())):
            unfinished = path.with_suffix(path.suffix + ".part")
            unfinished.write_text(text)
            os.replace(unfinished, path)

    def markdown(self) -> str:
        rows = [
            "| question | answer | figure |",
            "| :-- | :-- | :-- |",
            *(
                f"| {' | '.join(_cell(self.entries[name][part]) for part in ('question', 'answer', 'figure'))} |"
                for name in ORDER
                if name in self.entries
            ),
        ]
        about = ", ".join(f"{name} {value}" for name, value in self.about.items())
        return f"# First contact\n\n`python benchmarks/gpu/first_contact.py`: {about}.\n\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


class Asked:
    """A process that answers, started anew whenever the one before is gone."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._process: Process | None = None

    def ask(self, within: float, **request: Any) -> Any:
        """
        Raises:
            Failed: where there is no answer.
        """
        if self._process is None:
            self._process = Process("the answering process", [[sys.executable, __file__, "--answer", self._device]])
        try:
            return self._process.ask(within=within, **request)
        except Failed:
            self._process.kill()
            self.close()
            raise

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def ask(names: list[str], answers: Answers, asked: Asked, seconds: float) -> list[str]:
    """Asks one question after the other, until the seconds are over.

    Returns:
        The names of those that are left.
    """
    began = time.perf_counter()
    for number, name in enumerate(names):
        left = seconds - (time.perf_counter() - began)
        if left <= 5:
            return names[number:]
        start = time.perf_counter()
        try:
            entry = asked.ask(min(left, SECONDS[name]), question=name)
        except Failed as error:
            if left < SECONDS[name] and time.perf_counter() - began >= seconds:
                return names[number:]  # it was the run that had no time
            text = answers.entries.get(name, {}).get("question", name)
            entry = {"question": text, "answer": "no answer", "figure": str(error), "failed": True}
        answers.add(name, entry)
        took = time.perf_counter() - start
        print(f"{entry['question']} {entry['answer']} ({entry['figure']}) [{took:.1f} s]", flush=True)
    return []


def answer(device_name: str) -> None:
    """Reads requests, a JSON object per line, and prints an answer to each."""
    import torch

    from benchmarks.gpu import contact_cudnn, contact_program
    from benchmarks.gpu.bench import NoDevice, about
    from benchmarks.gpu.contact import NeedsGpu

    device = torch.device(device_name)
    questions = {**contact_cudnn.QUESTIONS, **contact_program.QUESTIONS}
    assert set(questions) == set(ORDER)

    def found(question: str | None) -> Entry:
        if question is None:
            try:
                return about(device)
            except NoDevice as error:
                return {"failed": str(error)}
        one, failed = questions[question], False
        try:
            said, figure = one.ask(device)
        except NeedsGpu as error:
            said, figure = str(error), "-"
        except Exception as error:  # whatever it is, it is the answer
            said, figure, failed = "it failed", (str(error) or repr(error)).splitlines()[0], True
        return {"question": one.text, "answer": said, "figure": figure, "failed": failed}

    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        if device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.set_device(device)
        for line in sys.stdin:
            print(json.dumps(found(json.loads(line)["question"])), file=answers, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=290.0, help="of this run (default %(default)g)")
    parser.add_argument("--results", metavar="FOLDER", type=Path, default=RESULTS, help="(default %(default)s)")
    parser.add_argument("--ask", action="append", choices=ORDER, help="this question, answered or not; may be repeated")
    parser.add_argument("--answer", metavar="DEVICE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options.answer)
        return 0
    began = time.perf_counter()
    asked = Asked(options.device)
    try:
        about = asked.ask(min(START_SECONDS, options.seconds), question=None)
        if "failed" in about:
            print(f"first_contact.py: {about['failed']}", file=sys.stderr)
            return 2
        answers = Answers(options.results, about)
        wanted = options.ask or [name for name in ORDER if answers.entries.get(name, {"failed": True})["failed"]]
        left = ask(wanted, answers, asked, options.seconds - (time.perf_counter() - began))
    except Failed as error:
        print(f"first_contact.py: {error}", file=sys.stderr)
        return 2
    finally:
        asked.close()
    failed = [name for name in ORDER if answers.entries.get(name, {}).get("failed")]
    done = f"{len(ORDER) - len(left)} of {len(ORDER)}" if not options.ask else f"{len(wanted) - len(left)}"
    told = f"; without an answer: {', '.join(failed)}" if failed else ""
    rest = f"; left: {', '.join(left)}" if left else ""
    print(f"first_contact.py: {done} questions asked, in {answers.markdown_path}{told}{rest}", file=sys.stderr)
    return 3 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
