"""Atomic writes, which leave a file with its old or its new content, never a part of either; locks of files."""

import contextlib
import fcntl
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from ldm_jax.errors import UserError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path` for writing; at the end it is flushed to disk and renamed to `path`.

    If the file cannot be written, this raises OSError, and the old file is unchanged.
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


@contextlib.contextmanager
def writing(what: object) -> Iterator[None]:
    """Turns an OSError in its body into a UserError which says that this file or directory cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror}.") from error


def require_absent(path: Path) -> None:
    """Raises UserError if there is a file, or a directory that is not empty."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists: give another --out.")


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside `path` to write to, which is renamed to `path` at the end.

    If its body fails, it is removed. Raises UserError if it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as directory:
            (written := Path(directory) / "written").mkdir()
            yield written
            written.rename(path)


def save_text(path: Path, text: str) -> None:
    """As `write_atomically`, but raises UserError."""
    with writing(path):
        write_atomically(path, text)


def acquire_lock(file: Path, use: str, option: str) -> TextIO:
    """Opens and locks a file, until it is closed or the process ends. Raises UserError if another process has it.

    Args:
        file: a file in the directory that is locked.
        use: what the other process does, as the error says it, such as "training in".
        option: what selects another directory.
    """
    opened = file.open("a")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        opened.close()
        raise UserError(f"another process is {use} {file.parent}: wait for it, or give another {option}.") from None
    return opened


def name_aside(path: Path) -> Path:
    """A name for the former content of a file, such as `metrics.before.jsonl`, that no file has yet."""
    names = (path.with_name(f"{path.stem}.before{number or ''}{path.suffix}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def user_cache() -> Path:
    """The directory for files that can be computed again. This function does not create it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ldm_jax"
