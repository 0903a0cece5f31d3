"""Where the rows of metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases."""

import contextlib
import importlib.util
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ldm_jax.config import Config
from ldm_jax.config.toml import config_to_table
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically
from ldm_jax.train.metrics import Row


@runtime_checkable
class Sink(Protocol):
    """Takes rows."""

    def write(self, row: Row) -> str | None:
        """Takes in a row; its `step` never falls. Returns why it could not, as a sentence, or None."""
        ...

    def close(self) -> None:
        """Hands on what has not been yet."""
        ...


def make_sinks(config: Config, run: Path, step: int) -> list[Sink]:
    """Those that `[log]` asks for, of a run that goes on from a step.

    Raises:
        UserError: one whose package is not installed.
    """
    sinks: list[Sink] = []
    if config.log.tensorboard:
        _require("tensorboardX", "log.tensorboard is true", "tensorboard")
        sinks.append(TensorBoard(run / "tensorboard", step))
    if config.log.wandb_project is not None:
        _require("wandb", f"log.wandb_project is {config.log.wandb_project}", "wandb")
        sinks.append(WeightsAndBiases(config, run))
    return sinks


class TensorBoard:
    """Event files in a folder; nested lists become one curve for each number.

    Written in step with the training: tensorboardX's own queue blocks for ever once its thread has met a full disk.
    """

    def __init__(self, folder: Path, step: int):
        self._folder, self._step = folder, step
        self._file: Path | None = None
        self._writer: Any = None

    def write(self, row: Row) -> str | None:
        """A scalar for each number. A failure can leave half an event, so the next row begins another file."""
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
            if self._file is not None and self._file != before:  # nothing of it has been written
                self._file.unlink(missing_ok=True)
            self._file = None
            return f"{self._folder} cannot be written: {error.strerror}. Rows are lost to TensorBoard until it can be."
        return None

    def _open(self) -> Any:
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.record_writer import RecordWriter

        if self._writer is not None:
            return self._writer
        self._folder.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in self._folder.iterdir())  # so that no file is written over
        self._file = self._folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{number}"
        self._writer = writer = RecordWriter(str(self._file))
        writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        # What an earlier process has written past the checkpoint is not shown.
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
    """A run in a project, which goes on under the same id when the training run does."""

    def __init__(self, config: Config, run: Path):
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=config.log.wandb_project,
            name=run.name,
            id=_identity(run / "wandb_id"),
            resume="allow",
            dir=str(run),
            config=config_to_table(config),
        )

    def write(self, row: Row) -> str | None:
        """A scalar for each number."""
        self._run.log(dict(_scalars(row)), step=row["step"])
        return None

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def _identity(file: Path) -> str:
    """The run's own, the same at every start."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, uuid.uuid4().hex)
    return file.read_text()


def _scalars(row: Row) -> Iterator[tuple[str, float]]:
    """Names and numbers; those of nested lists are named by their places, such as `gate/sublayer_3/group_0`."""

    def inside(name: str, value: Any, axes: tuple[str, ...]) -> Iterator[tuple[str, float]]:
        if isinstance(value, list):
            for place, part in enumerate(value):
                yield from inside(f"{name}/{axes[0]}_{place}", part, axes[1:])
        else:
            yield name, value

    for name, value in row.items():
        if name != "step":
            yield from inside(name, value, ("sublayer", "group"))


def _require(package: str, because: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{because}, but {package} is not installed: pip install -e '.[{extra}]'.")
