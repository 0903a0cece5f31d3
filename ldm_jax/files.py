"""Files that are either the old ones or the new ones, never half of either."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside `path` to write to; it is flushed to disk and renamed when all has been written.

    Raises:
        OSError: as of writing a file; the old file is as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Writes to a temporary name beside the file, flushes it to disk, then renames it.

    Raises:
        OSError: as of writing a file; the old file is as it was.
    """
    with replacing(path) as file:
        file.write(text.encode())


def user_cache() -> Path:
    """The folder for what can be made again; not made here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ldm_jax"
