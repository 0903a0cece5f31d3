"""Where metrics go: `metrics.jsonl`, TensorBoard, Weights & Biases."""

import contextlib
import importlib.util
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ldm_jax.config import Config
from ldm_jax.config.toml import config_to_table
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically
from ldm_jax.parallel import is_leader
from ldm_jax.train.metrics import MetricsFile, Row


class TensorBoard:
    """TensorBoard event files in a directory, a curve for each number of a nested list.

    Written synchronously, because the queue of tensorboardX blocks forever once its thread has met a full disk.
    """

    def __init__(self, directory: Path, step: int):
        self._directory, self._step = directory, step
        self._file: Path | None = None
        self._writer: Any = None

    def write(self, row: Row) -> str | None:
        """Writes a scalar for each number. A failure can leave half an event, so the next row starts another file."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.summary import scalar

        before = self._file
        try:
            writer = self._open()
            for name, value in _scalars(row):
                event = Event(wall_time=time.time(), step=row["step"], summary=scalar(name, value))
                writer.write(event.SerializeToString())
            writer.flush()
        except OSError as error:
            self.close()
            if self._file is not None and self._file != before:  # a new file without a complete row
                self._file.unlink(missing_ok=True)
            self._file = None
            return f"{self._directory} cannot be written: {error.strerror}. TensorBoard loses rows until it can be."
        return None

    def _open(self) -> Any:
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.record_writer import RecordWriter

        if self._writer is not None:
            return self._writer
        self._directory.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in self._directory.iterdir())  # so that no file is overwritten
        self._file = self._directory / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{number}"
        self._writer = writer = RecordWriter(str(self._file))
        writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        # Hides the rows that an earlier start wrote after its checkpoint.
        start = SessionLog(status=SessionLog.START)
        event = Event(wall_time=time.time(), step=self._step + 1, session_log=start)
        writer.write(event.SerializeToString())
        return writer

    def close(self) -> None:
        """Closes the file."""
        writer, self._writer = self._writer, None
        with contextlib.suppress(OSError):
            if writer is not None:
                writer.close()


class WeightsAndBiases:
    """A run in a project, which continues under the same id when the training run is resumed.

    The library numbers the rows itself, and drops those whose number does not increase. The step is therefore a metric
    of its own, against which the others are drawn. Rows written after the last checkpoint of an interrupted run remain,
    and the resumed run's rows of the same steps are drawn beside them.
    """

    def __init__(self, config: Config, run: Path):
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=config.log.wandb_project,
            name=run.name,
            id=_run_id(run / "wandb_id"),
            resume="allow",
            dir=str(run),
            config=config_to_table(config),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> str | None:
        """Writes a scalar for each number."""
        self._run.log({"step": row["step"], **dict(_scalars(row))})
        return None

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


def _run_id(file: Path) -> str:
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, uuid.uuid4().hex)
    return file.read_text()


def _scalars(row: Row) -> Iterator[tuple[str, float]]:
    """Names and numbers; an entry of a nested list is named by its indices, such as `gate/sublayer_3/group_0`."""

    def flatten(name: str, value: Any, axes: tuple[str, ...]) -> Iterator[tuple[str, float]]:
        if isinstance(value, list):
            for index, part in enumerate(value):
                yield from flatten(f"{name}/{axes[0]}_{index}", part, axes[1:])
        else:
            yield name, value

    for name, value in row.items():
        if name != "step":
            yield from flatten(name, value, ("sublayer", "group"))


def _require(package: str, because: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{because}, but {package} is not installed: pip install -e '.[{extra}]'.")


Sink = MetricsFile | TensorBoard | WeightsAndBiases
"""A destination of metrics: `write` returns None, or why a row cannot be written, as a sentence."""


def make_sinks(config: Config, run: Path, step: int) -> list[Sink]:
    """The sinks that `[log]` selects, for a run that starts after `step`. Raises UserError if a package is missing."""
    sinks: list[Sink] = []
    if config.log.tensorboard:
        _require("tensorboardX", "log.tensorboard is true", "tensorboard")
        sinks.append(TensorBoard(run / "tensorboard", step))
    if config.log.wandb_project is not None:
        _require("wandb", f"log.wandb_project is {config.log.wandb_project}", "wandb")
        sinks.append(WeightsAndBiases(config, run))
    return sinks


class MetricsLogger:
    """All sinks of a run that starts after `step`. Only process 0 has any.

    Raises:
        UserError: a package is not installed, or `metrics.jsonl` cannot be written.
    """

    def __init__(self, config: Config, run: Path, step: int):
        self._sinks: list[Sink] = []
        self.warning: str | None = None
        """A sentence about a former `metrics.jsonl` that was kept under another name."""
        if is_leader():
            file = MetricsFile(run / "metrics.jsonl", step)
            self.warning = file.warning
            self._sinks = [file, *make_sinks(config, run, step)]

    def write(self, row: Row) -> list[str]:
        """Writes a row to every sink; its `step` never decreases. Returns a sentence for each sink that failed."""
        return [failure for sink in self._sinks if (failure := sink.write(row)) is not None]

    def close(self) -> None:
        """Closes all sinks."""
        for sink in self._sinks:
            sink.close()
