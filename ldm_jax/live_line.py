"""A line that moves in a terminal, and is printed anew elsewhere."""

from typing import TypeVar

from rich.console import Console
from rich.live import Live

Line = TypeVar("Line", bound="LiveLine")


class LiveLine:
    """One line of a console. A context manager."""

    def __init__(self, console: Console):
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self: Line) -> Line:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def moves(self) -> bool:
        """Whether the line is written over."""
        return self._live is not None

    def update(self, line: str) -> None:
        """The line as it is now."""
        if self._live is None:
            self.note(line)
        else:
            self._live.update(line, refresh=True)

    def note(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, highlight=False, soft_wrap=True)
