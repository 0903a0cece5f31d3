"""Where checkpoints are stored: a directory or a bucket, the check that it can be written, its errors as sentences."""

import logging
import re
import sys

import jax
from etils import epath

from ldm_jax.errors import UserError
from ldm_jax.parallel import first_failure

PROBE_FILE = ".writable"
"""How the files begin by which each process finds out whether it can write to a store."""
STORE_FILE = ".run"
"""The file in a store of checkpoints that holds the identity of their run, and is locked in training, if local."""


def in_bucket(where: epath.PathLike) -> bool:
    """Whether a path is in a bucket (`gs://BUCKET/DIRECTORY`)."""
    return "://" in str(where)


def storage_path(where: epath.PathLike) -> epath.Path:
    """The path of a directory, here or in a bucket. Raises UserError if it is in a bucket, and gcsfs is missing."""
    if not in_bucket(where):
        return epath.Path(where).absolute()
    try:
        import gcsfs  # noqa: F401  # pyright: ignore[reportMissingImports]
        from fsspec.config import conf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"{where} is in a bucket, which needs gcsfs: pip install 'ldm_jax[gcs]'.") from error
    # A cached listing of a bucket is soon wrong, because TensorStore and other processes write to it, too.
    conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(where)


def require_writable(directory: epath.Path) -> None:
    """Makes the directory; writes, reads and removes a file there. All processes must call it. Raises UserError."""
    why = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"{PROBE_FILE}.{jax.process_index()}"  # the next start removes it if this one is killed
        try:
            file.write_text(file.name)
            if file.read_text() != file.name:
                raise OSError("a file has another content after it is written")
        finally:
            file.unlink(missing_ok=True)
    except Exception as error:  # storage drivers raise types of their own
        missing = in_bucket(directory) and isinstance(error, FileNotFoundError)
        why = f"the bucket {directory.parts[2]} does not exist." if missing else storage_error(error)
        why = f"checkpoints cannot be saved to {directory}: {why}"
    if (why := first_failure(why)) is not None:
        raise UserError(f"{why} Set train.checkpoints to a directory or bucket that can be written.")


def storage_error(error: BaseException) -> str:
    """The cause of a storage error in one sentence; Orbax's own message names every layer that it passed through."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}."
    text = re.split(r"\n|\.\s| \[\w+=", str(error).strip())[0] or type(error).__name__
    if "OCDBT" in text or re.match(r"[A-Z_]+: ", text):  # TensorStore names every layer, and the cause last
        text = text.split(": ")[-1]
    return text[:300].rstrip(".") + "."


def silence_background_errors() -> None:
    """Drops the tracebacks of errors in background threads, which are also raised and reported in one sentence.

    Orbax abandons the other writes of a save that has failed, and closes the event loop that they report to.
    """
    for name in ("absl", "asyncio", "gcsfs"):
        logging.getLogger(name).addFilter(_is_not_of_storage)
    if sys.unraisablehook is not _report_unraisable:
        _earlier_hooks.append(sys.unraisablehook)
        sys.unraisablehook = _report_unraisable


_earlier_hooks = []


def _is_not_of_storage(record: logging.LogRecord) -> bool:
    abandoned = record.name == "asyncio" and "exception was never retrieved" in record.getMessage()
    by_storage = record.name == "gcsfs" or "orbax" in record.pathname
    return not (abandoned or (by_storage and record.levelno >= logging.WARNING))


def _report_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        _earlier_hooks[-1](unraisable)
