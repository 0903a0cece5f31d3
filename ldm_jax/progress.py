"""The progress line of training and of data preparation: redrawn in a terminal, printed line by line elsewhere."""

import datetime
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

Line = TypeVar("Line", bound="ProgressLine")

PREPARATION_LOG_SECONDS = 20.0
"""Time between two lines of a preparation outside of a terminal."""


class ProgressLine:
    """One line of a console, as a context manager.

    Args:
        console: where the line is shown.
        log_seconds: least time between two lines where the console is not a terminal.
    """

    def __init__(self, console: Console, log_seconds: float = 0.0):
        self._console, self._log_seconds = console, log_seconds
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._logged = time.monotonic()

    def __enter__(self: Line) -> Line:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, line: str, seconds_left: float | None = None) -> None:
        """Shows the current state of the job."""
        if seconds_left is not None:
            line += f"  {datetime.timedelta(seconds=round(seconds_left))} left"
        if self._live is not None:
            self._live.update(Text(line), refresh=True)
        elif time.monotonic() - self._logged >= self._log_seconds:
            self._logged = time.monotonic()
            self.note(line)

    def note(self, line: str) -> None:
        """Prints a line that stays."""
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


class TrainingLine(ProgressLine):
    """Loss, tokens per second and time left of a run of so many steps."""

    def __init__(self, console: Console, steps: int):
        super().__init__(console)
        self._steps = steps

    def show(self, row: Mapping[str, Any], seconds_per_step: float | None) -> None:
        """Shows a row of training metrics; without `seconds_per_step`, neither speed nor time left."""
        line = (
            f"step {row['step']:>{len(str(self._steps))}}/{self._steps}  loss {row['loss']:.4f}  "
            f"grad norm {row['grad_norm']:.2f}  lr {row['learning_rate']:.2e}"
        )
        if seconds_per_step is None:
            self.update(line)
        else:
            left = (self._steps - row["step"]) * seconds_per_step
            self.update(f"{line}  {row['tokens_per_second']:,.0f} tokens/s", left)


class PreparationLine(ProgressLine):
    """Shards, tokens, tokens per second, fraction done and time left of a corpus that is being prepared.

    Args:
        console: where the line is shown.
        tokens: tokens that an earlier start has written.
        done: fraction of the source that they are.
    """

    def __init__(self, console: Console, tokens: int, done: float):
        super().__init__(console, PREPARATION_LOG_SECONDS)
        self._first_tokens, self._first_done, self._started = tokens, done, time.monotonic()
        if tokens:
            self.note(f"resuming after {tokens:,} tokens")

    def show(self, shards: int, tokens: int, done: float | None) -> None:
        """Shows the state; `done` is None where the length of the source is not known."""
        seconds = max(time.monotonic() - self._started, 1e-3)
        speed = (tokens - self._first_tokens) / seconds
        line = f"{shards:,} shard{'s' * (shards != 1)}  {tokens:,} tokens  {speed:,.0f} tokens/s"
        if done is not None and done > self._first_done:
            self.update(f"{line}  {done:.0%}", seconds * (1 - done) / (done - self._first_done))
        else:
            self.update(line)
