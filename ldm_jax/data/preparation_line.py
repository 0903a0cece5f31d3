"""What a preparation prints: a line that moves in a terminal, a line every now and then elsewhere."""

import time

from rich.console import Console
from rich.live import Live

from ldm_jax.data.preparation_folder import Progress

SECONDS = 20.0  # from one line to the next where nothing moves


class PreparationLine:
    """Shards, tokens, tokens per second. A context manager."""

    def __init__(self, console: Console, before: Progress):
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._before = _tokens(before)
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> "PreparationLine":
        if self._before:
            self._print(f"goes on after {self._before:,} tokens")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress, waiting: int) -> None:
        """How far it is: whole shards, and tokens of the next one."""
        now = time.monotonic()
        tokens = _tokens(progress) + waiting
        rate = (tokens - self._before) / max(now - self._started, 1e-3)
        where = f"  file {progress.position[0] + 1}" if isinstance(progress.position, list) else ""
        line = f"{progress.shards:,} shards  {tokens:,} tokens  {rate:,.0f} tokens/s{where}"
        if self._live is not None:
            self._live.update(line, refresh=True)
        elif now - self._shown >= SECONDS:
            self._print(line)
            self._shown = now

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def _tokens(progress: Progress) -> int:
    return sum(shard.tokens for shard in (*progress.train, *progress.validation))
