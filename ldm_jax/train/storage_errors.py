"""What goes wrong while a checkpoint is written or read, in a sentence, of all processes."""

import logging
import re

import jax

from ldm_jax.parallel import first_failure

LONGEST_WAIT = 300  # seconds, of one process for another, before a save or a restore has failed
WAITED_IN_VAIN = f"it has waited {LONGEST_WAIT} seconds for another process"


def reason_of_all(why: str | None) -> str | None:
    """The first reason of any process; that it has waited in vain for another one is the last to be told."""
    if jax.process_count() == 1:
        return why
    why = why and f"process {jax.process_index()}: {why}"
    waited = why is not None and WAITED_IN_VAIN in why
    return first_failure(None if waited else why) or first_failure(why)


def not_of_storage(record: logging.LogRecord) -> bool:
    """The storage layer logs pages about an error that it raises, too: we say it in a sentence."""
    return not (record.levelno >= logging.WARNING and "orbax" in record.pathname)


def reason(error: BaseException) -> str:
    """What an error says, short: the storage layer's text names every layer that it went through."""
    if jax.process_count() > 1 and re.search("Barrier timed out|Timed out while waiting", str(error)):
        # What has failed before it is not to be lost.
        return f"{WAITED_IN_VAIN}." if error.__context__ is None else reason(error.__context__)
    text = str(error).strip()
    found = re.search(r": ([^:\[\]]+) \[os_error_code=", text)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif found is not None:
        text = found[1]
    return (text.splitlines() or [type(error).__name__])[0][:300].rstrip(".") + "."
