"""metrics.jsonl: one JSON object a line, no step twice."""

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
        UserError: another line is not a row.
    """
    rows = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
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

    Raises:
        UserError: the file cannot be written, or the run starts anew but its rows say that it had checkpoints.
    """

    def __init__(self, path: Path, step: int, checkpoint_every: int):
        rows = read_metrics(path)
        if step == 0 and rows and rows[-1]["step"] > checkpoint_every:
            raise UserError(
                f"{path} has rows up to step {rows[-1]['step']}, but the run's checkpoints are gone: move the file "
                "away to start anew, or give another --run."
            )
        kept = [row for row in rows if row["step"] <= step]
        try:
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.") from error
        self._path, self._unwritten = path, b""

    def write(self, row: Row) -> str | None:
        """Appends a row. Returns why it could not be, as a sentence; then it is written with a later one."""
        self._unwritten += json.dumps(row).encode() + b"\n"
        try:
            while self._unwritten:
                # A full disk can take a part of a line; the rest follows it when there is space.
                self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]
        except OSError as error:
            return f"{self._path} cannot be written: {error.strerror}. Its rows are kept until there is space."
        return None

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
