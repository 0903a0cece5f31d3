"""metrics.jsonl: a JSON object on each line, no step twice."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically

Row = Mapping[str, Any]
"""Numbers by name, always with `step`. The statistics of a depth memory are nested lists of numbers."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a file in order, without an incomplete last line; no rows if there is no file.

    Raises:
        UserError: the file cannot be read, or a line is not a row of metrics.
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
            raise UserError(f"line {number} of {path} is not a row of metrics: correct it, or move the file away.")
    return rows


class MetricsFile:
    """Appends rows to a file, after removing the rows that an earlier start wrote later than its checkpoint.

    If the run starts at step 0 but the file has rows, the file is renamed and a new one is started.

    Raises:
        UserError: the file cannot be written, or a line is not a row of metrics.
    """

    def __init__(self, path: Path, step: int):
        rows = read_metrics(path)
        self.renamed: Path | None = None
        """The new name of a file whose rows have no checkpoint."""
        try:
            if step == 0 and rows:
                names = (path.with_name(f"{path.stem}.before{n or ''}{path.suffix}") for n in itertools.count())
                self.renamed = next(name for name in names if not name.exists())
                path.rename(self.renamed)
            kept = [row for row in rows if row["step"] <= step]
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.") from error
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
