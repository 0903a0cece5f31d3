"""SIGTERM and SIGINT as a request to stop after the current step."""

import signal
import threading
from collections.abc import Callable
from types import FrameType


class StopSignal:
    """A context manager that records the first SIGTERM or SIGINT. A second one acts as it does by default."""

    def __init__(self) -> None:
        self.number = 0
        """The signal received; 0 for none."""
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # only this thread may set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    @property
    def name(self) -> str | None:
        """The name of the signal received, such as SIGTERM."""
        return signal.Signals(self.number).name if self.number else None

    def requested(self, vote: Callable[[int], int] | None = None) -> bool:
        """Whether to stop now.

        Args:
            vote: for several processes: takes this process's signal, and returns the same signal, or 0, on all.
        """
        number = self.number if vote is None else vote(self.number)
        if number:  # do not overwrite a signal that arrived during the vote
            self.number = number
        return number != 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._previous = {}
