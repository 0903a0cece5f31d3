"""SIGTERM and SIGINT as a wish: the loop sees it after the step at hand."""

import signal
import threading
from types import FrameType, TracebackType


class StopSignal:
    """Inside the context, the first signal is noted; a second one acts as before, so that Ctrl-C twice ends all."""

    def __init__(self) -> None:
        self.number = 0
        """The signal that came; 0 if none has."""
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @property
    def name(self) -> str | None:
        """Of the signal that came, such as SIGTERM."""
        return signal.Signals(self.number).name if self.number else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._before = {}
