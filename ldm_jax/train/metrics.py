"""metrics.jsonl: one JSON object a line, no step twice."""

import json
from collections.abc import Mapping
from pathlib import Path

from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically

Row = Mapping[str, int | float]


def read_metrics(path: Path) -> list[dict[str, int | float]]:
    """The rows of a file, in order; a last line that was cut off by a kill is left out. No file: no rows."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class MetricsFile:
    """Appends rows to a file, after the rows that a resumed run had written past its checkpoint are taken out.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path, step: int):
        rows = [row for row in read_metrics(path) if row["step"] <= step]
        try:
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.") from error
        self._path = path

    def write(self, row: Row) -> None:
        """Appends a row. Raises UserError when the disk is full."""
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written: {error.strerror}. The last checkpoint is kept: free some space and "
                "start again with the same command."
            ) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
