"""Where a run's rows of metrics go: its file, and the sinks that `[log]` asks for."""

import contextlib

from ldm_jax.config import Config
from ldm_jax.parallel import leads
from ldm_jax.train.metrics import MetricsFile, Row
from ldm_jax.train.run_directory import RunDirectory
from ldm_jax.train.sinks import Sink, make_sinks


class Records:
    """Takes rows, of a run that goes on from a step. Of several processes only the first has any.

    Raises:
        UserError: a sink is not installed, or the file cannot be written, or holds what is no row.
    """

    def __init__(self, config: Config, directory: RunDirectory, step: int):
        self._resources = contextlib.ExitStack()
        self._all: list[Sink] = []
        self.warning: str | None = None
        """What was found in the folder that should not have been there, as a sentence."""
        if not leads():
            return
        file = self._resources.enter_context(contextlib.closing(MetricsFile(directory.metrics_file, step)))
        if file.put_aside is not None:
            self.warning = f"there were rows of metrics, but no checkpoint: they are now in {file.put_aside}"
        sinks = make_sinks(config, directory.path, step)
        for sink in sinks:
            self._resources.enter_context(contextlib.closing(sink))
        self._all = [file, *sinks]

    def write(self, row: Row) -> list[str]:
        """Hands the row on. Returns the sentences of those that could not take it."""
        return [failure for each in self._all if (failure := each.write(row)) is not None]

    def close(self) -> None:
        """Closes the files."""
        self._resources.close()
