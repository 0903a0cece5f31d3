"""What a run prints: a line that moves in a terminal, one line a log step elsewhere."""

import datetime

from rich.console import Console

from ldm_jax.live_line import LiveLine
from ldm_jax.train.metrics import Row


class ProgressLine(LiveLine):
    """Loss, tokens per second and time left."""

    def __init__(self, console: Console, steps: int):
        super().__init__(console)
        self._steps = steps

    def show(self, row: Row, seconds_per_step: float | None) -> None:
        """A training row. Without a time for a step, nothing is said of speed."""
        line = (
            f"step {row['step']:>{len(str(self._steps))}}/{self._steps}  loss {row['loss']:.4f}  "
            f"gradient {row['grad_norm']:.2f}  rate {row['learning_rate']:.2e}"
        )
        if seconds_per_step is not None:
            left = datetime.timedelta(seconds=round((self._steps - row["step"]) * seconds_per_step))
            line += f"  {row['tokens_per_second']:,.0f} tokens/s  {left} left"
        self.update(line)
