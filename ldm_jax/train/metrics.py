"""metrics.jsonl: a JSON object on each line, no step twice."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ldm_jax.errors import UserError
from ldm_jax.files import name_aside, write_atomically, writing

Row = Mapping[str, Any]
"""Numbers by name, always with `step`. The statistics of a depth memory are nested lists of numbers."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a file in order; no rows if there is no file. A line on stderr reports lines that are not rows.

    Raises:
        UserError: the file cannot be read.
    """
    rows, invalid = _read(path)
    if invalid:
        print(f"warning: line {invalid[0]} of {path} is not a row of metrics, and is left out.", file=sys.stderr)
    return rows


def _read(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows, and the numbers of the lines that are none, without an incomplete last line."""
    rows, invalid = [], []
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        elif number < len(lines) or line.endswith(b"\n"):
            invalid.append(number)
    return rows, invalid


class MetricsFile:
    """Appends rows to a file, after removing the rows that an earlier start wrote later than its checkpoint.

    If the run starts at step 0 but the file has rows, or if it has lines that are not rows, it is kept under another
    name.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path, step: int):
        rows, invalid = _read(path)
        self.warning: str | None = None
        """A sentence that says why the file was kept under another name."""
        with writing(path):
            if invalid or (step == 0 and rows):
                shutil.copyfile(path, kept := name_aside(path))
                why = f"line {invalid[0]} is not a row" if invalid else "there are rows, but no checkpoint"
                self.warning = f"{path} is kept as {kept}: {why}."
            kept_rows = [row for row in rows if row["step"] <= step]
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept_rows))
            self._file = path.open("ab", buffering=0)
        self._path, self._unwritten = path, b""

    def write(self, row: Row) -> str | None:
        """Appends a row. Returns None, or why it cannot be written, as a sentence; the next call then writes both."""
        self._unwritten += json.dumps(row).encode() + b"\n"
        return self._flush()

    def _flush(self) -> str | None:
        try:
            while self._unwritten:  # a full disk can accept a part of a line; the rest is appended later
                self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]
        except OSError as error:
            return f"{self._path} cannot be written: {error.strerror}. Its rows are kept in memory until it can be."
        return None

    def close(self) -> None:
        """Tries once more to write the rows that could not be written, and closes the file."""
        self._flush()
        self._file.close()
