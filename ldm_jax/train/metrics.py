"""metrics.jsonl: one JSON object a line, no step twice."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically

Row = Mapping[str, Any]
"""Numbers by name, `step` among them; of a depth memory, nested lists of numbers."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, in order; a last line that was cut off by a kill is left out. No file: no rows.

    Raises:
        UserError: the file cannot be read, or another line is not a row.
    """
    rows = []
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
            raise UserError(f"line {number} of {path} is no row of metrics: mend it, or move the file away.")
    return rows


class MetricsFile:
    """Appends rows to a file, after the rows that a resumed run had written past its checkpoint are taken out.

    A run that starts anew where rows are leaves them in a file of another name.

    Raises:
        UserError: the file cannot be written, or holds what is no row.
    """

    def __init__(self, path: Path, step: int):
        rows = read_metrics(path)
        self.put_aside: Path | None = None
        """Where the rows of a run are that had come to no checkpoint."""
        try:
            if step == 0 and rows:
                self.put_aside = _unused(path)
                path.rename(self.put_aside)
            kept = [row for row in rows if row["step"] <= step]
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.") from error
        self._path, self._unwritten = path, b""

    def write(self, row: Row) -> str | None:
        """Appends a row. Returns why it could not be, as a sentence; then it is written with a later one."""
        self._unwritten += json.dumps(row).encode() + b"\n"
        return self._flush()

    def _flush(self) -> str | None:
        try:
            while self._unwritten:
                # A full disk can take a part of a line; the rest follows it when there is space.
                self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]
        except OSError as error:
            return f"{self._path} cannot be written: {error.strerror}. Its rows are kept until there is space."
        return None

    def close(self) -> None:
        """Writes what a full disk did not take before, if it does now, and closes the file."""
        self._flush()
        self._file.close()


def _unused(path: Path) -> Path:
    """A name beside the path that no file has."""
    names = (path.with_name(f"{path.stem}.before{number or ''}{path.suffix}") for number in itertools.count())
    return next(name for name in names if not name.exists())
