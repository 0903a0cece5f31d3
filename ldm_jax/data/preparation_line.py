"""What a preparation prints: a line that moves in a terminal, a line every now and then elsewhere."""

import datetime
import time

from rich.console import Console

from ldm_jax.data.documents import DocumentSource, Position
from ldm_jax.data.prepared_corpus import PreparationProgress
from ldm_jax.live_line import LiveLine

SECONDS = 20.0  # from one line to the next where nothing moves


class PreparationLine(LiveLine):
    """Shards, tokens, tokens per second, how much is done, time left."""

    def __init__(self, console: Console, before: PreparationProgress, source: DocumentSource):
        super().__init__(console)
        self._source = source
        self._before = _tokens(before)
        self._done_before = self._done(before.position)
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> "PreparationLine":
        if self._before:
            self.note(f"goes on after {self._before:,} tokens")
        return super().__enter__()

    def show(self, progress: PreparationProgress, waiting: int, position: Position) -> None:
        """How far it is: whole shards, tokens of the next one, where the source is read on."""
        now = time.monotonic()
        tokens, seconds = _tokens(progress) + waiting, max(now - self._started, 1e-3)
        line = f"{progress.shards:,} shards  {tokens:,} tokens  {(tokens - self._before) / seconds:,.0f} tokens/s"
        done = self._done(position)
        if done > self._done_before:
            left = seconds * (1 - done) / (done - self._done_before)
            line += f"  {done:.0%}  {datetime.timedelta(seconds=round(left))} left"
        if self.moves or now - self._shown >= SECONDS:
            self.update(line)
            self._shown = now

    def _done(self, position: Position) -> float:
        return 0.0 if position is None else self._source.done(position) or 0.0


def _tokens(progress: PreparationProgress) -> int:
    return sum(shard.tokens for shard in (*progress.train, *progress.validation))
