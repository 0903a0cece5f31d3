"""What a preparation prints: a line that moves in a terminal, a line every now and then elsewhere."""

import datetime
import time

from rich.console import Console
from rich.live import Live

from ldm_jax.data.documents import DocumentSource, Position
from ldm_jax.data.preparation_folder import Progress

SECONDS = 20.0  # from one line to the next where nothing moves


class PreparationLine:
    """Shards, tokens, tokens per second, how much is done, time left. A context manager."""

    def __init__(self, console: Console, before: Progress, source: DocumentSource):
        self._console, self._source = console, source
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._before = _tokens(before)
        self._done_before = self._done(before.position)
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

    def show(self, progress: Progress, waiting: int, position: Position) -> None:
        """How far it is: whole shards, tokens of the next one, where the source is read on."""
        now = time.monotonic()
        tokens, seconds = _tokens(progress) + waiting, max(now - self._started, 1e-3)
        line = f"{progress.shards:,} shards  {tokens:,} tokens  {(tokens - self._before) / seconds:,.0f} tokens/s"
        done = self._done(position)
        if done > self._done_before:
            left = seconds * (1 - done) / (done - self._done_before)
            line += f"  {done:.0%}  {datetime.timedelta(seconds=round(left))} left"
        if self._live is not None:
            self._live.update(line, refresh=True)
        elif now - self._shown >= SECONDS:
            self._print(line)
            self._shown = now

    def _done(self, position: Position) -> float:
        return 0.0 if position is None else self._source.done(position) or 0.0

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def _tokens(progress: Progress) -> int:
    return sum(shard.tokens for shard in (*progress.train, *progress.validation))
