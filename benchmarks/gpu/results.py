"""Results of benchmarks/gpu/gpu.py: a file that grows unit by unit, so that a later run goes on where one ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class ResultsError(RuntimeError):
    """The file cannot be gone on with; the message is one line."""


class Results:
    """What has been measured, by the units' keys.

    Attributes:
        folder: holds gpu.json, gpu.md and gpu-times.sqlite.
        about: where it was measured: device, versions.
        rows: by key.
    """

    def __init__(self, folder: Path, about: dict[str, str] | None, rows: dict[str, Row]) -> None:
        self.folder = folder
        self.about = about
        self.rows = rows

    @classmethod
    def load(cls, folder: Path) -> Results:
        """What the folder holds; nothing where there is no file yet.

        Raises:
            ResultsError: for a file of another kind.
        """
        path = folder / "gpu.json"
        try:
            content = json.loads(path.read_text())
            about, rows = content["about"], content["rows"]
            if not (
                isinstance(about, dict) and isinstance(rows, dict) and all(isinstance(r, dict) for r in rows.values())
            ):
                raise TypeError
            return cls(folder, about, rows)
        except FileNotFoundError:
            return cls(folder, None, {})
        except OSError as error:
            raise ResultsError(f"{path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{path}: these are no results of benchmarks/gpu/gpu.py; name another folder") from error

    @property
    def database(self) -> Path:
        return self.folder / "gpu-times.sqlite"

    def continue_on(self, about: dict[str, str]) -> None:
        """Makes sure that what is added is measured as what is there.

        Raises:
            ResultsError: where it is not.
        """
        if self.about is not None and self.about != about:
            changes = [
                f"{name} {self.about.get(name)} (now {about[name]})"
                for name in about
                if self.about.get(name) != about[name]
            ]
            raise ResultsError(f"{self.folder}: measured with {', '.join(changes)}: name another folder with --results")
        self.about = about

    def is_done(self, key: str, limits: Iterable[int], retry: bool) -> bool:
        """Whether a unit is measured, for every limit in bytes; a failed one counts unless it is to be tried again."""
        row = self.rows.get(key)
        if row is None or "failed" in row:
            return row is not None and not retry
        return "limits" not in row or {str(limit) for limit in limits} <= row["limits"].keys()

    def add(self, key: str, row: Row) -> None:
        """Keeps a row, on the file before this returns; of another run's row, the limits that are not in this stay."""
        before = self.rows.get(key, {})
        if "limits" in before and "limits" in row:
            row = {**row, "limits": {**before["limits"], **row["limits"]}}
        self.rows[key] = row
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write("gpu.json", json.dumps({"about": self.about, "rows": self.rows}, indent=1) + "\n")

    def write(self, name: str, text: str) -> None:
        """Replaces a file of the folder as a whole."""
        path = self.folder / name
        unfinished = path.with_suffix(path.suffix + ".part")
        unfinished.write_text(text)
        os.replace(unfinished, path)
