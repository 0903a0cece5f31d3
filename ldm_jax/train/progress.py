"""What a run prints: a line that moves in a terminal, one line a log step elsewhere."""

import datetime

from rich.console import Console
from rich.live import Live

from ldm_jax.train.metrics import Row


class ProgressLine:
    """Loss, tokens per second and time left. A context manager."""

    def __init__(self, console: Console, steps: int):
        self._console, self._steps = console, steps
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "ProgressLine":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, row: Row, seconds_per_step: float | None) -> None:
        """A training row. Without a time for a step, nothing is said of speed."""
        line = (
            f"step {row['step']:>{len(str(self._steps))}}/{self._steps}  loss {row['loss']:.4f}  "
            f"gradient {row['grad_norm']:.2f}  rate {row['learning_rate']:.2e}"
        )
        if seconds_per_step is not None:
            left = datetime.timedelta(seconds=round((self._steps - row["step"]) * seconds_per_step))
            line += f"  {row['tokens_per_second']:,.0f} tokens/s  {left} left"
        if self._live is None:
            self._console.print(line, highlight=False, soft_wrap=True)
        else:
            self._live.update(line, refresh=True)

    def note(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, highlight=False, soft_wrap=True)
