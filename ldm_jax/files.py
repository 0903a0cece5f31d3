"""Atomic writes: a file has either its old or its new content, never a part of either."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path` for writing; at the end it is flushed to disk and renamed to `path`.

    Raises:
        OSError: the file cannot be written; the old file is unchanged.
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
    """Replaces the content of a file, as `replacing`. Raises OSError; the old file is then unchanged."""
    with replacing(path) as file:
        file.write(text.encode())


def name_aside(path: Path) -> Path:
    """A name for the former content of a file, such as `metrics.before.jsonl`, that no file has yet."""
    names = (path.with_name(f"{path.stem}.before{number or ''}{path.suffix}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def user_cache() -> Path:
    """The directory for files that can be computed again. This function does not create it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ldm_jax"
