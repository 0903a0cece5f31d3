"""Files that are either the old ones or the new ones, never half of either."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes to a temporary name beside the file, flushes it to disk, then renames it.

    Raises:
        OSError: as of writing a file; the old file is as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
