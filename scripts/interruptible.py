"""Imported first by every script: Ctrl-C during the other imports, which take seconds, ends it with one line."""

import os
import signal
from types import FrameType


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\ninterrupted.\n")
    os._exit(128 + number)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored in a shell's background jobs
    signal.signal(signal.SIGINT, _exit)
