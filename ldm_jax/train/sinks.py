"""Where the rows of metrics go beside `metrics.jsonl`: TensorBoard, Weights & Biases."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ldm_jax.config import Config
from ldm_jax.config_file import config_to_table
from ldm_jax.errors import UserError
from ldm_jax.train.metrics import Row


@runtime_checkable
class Sink(Protocol):
    """Takes rows."""

    def write(self, row: Row) -> None:
        """Takes in a row; its `step` never falls."""
        ...

    def close(self) -> None:
        """Hands on what has not been yet."""
        ...


def make_sinks(config: Config, run: Path) -> list[Sink]:
    """Those that `[log]` asks for.

    Raises:
        UserError: one whose package is not installed.
    """
    sinks: list[Sink] = []
    if config.log.tensorboard:
        _require("tensorboardX", "log.tensorboard is true", "tensorboard")
        sinks.append(TensorBoard(run / "tensorboard"))
    if config.log.wandb_project is not None:
        _require("wandb", f"log.wandb_project is {config.log.wandb_project}", "wandb")
        sinks.append(WeightsAndBiases(config, run))
    return sinks


class TensorBoard:
    """Event files in a folder; nested lists become one curve for each number."""

    def __init__(self, folder: Path):
        import tensorboardX

        self._writer = tensorboardX.SummaryWriter(str(folder))

    def write(self, row: Row) -> None:
        """A scalar for each number."""
        for name, value in _scalars(row):
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run in a project, which goes on under the same id when the training run does."""

    def __init__(self, config: Config, run: Path):
        import wandb  # pyright: ignore[reportMissingImports]

        identity = "".join(character if character.isalnum() else "-" for character in str(run.absolute()))[-100:]
        self._run = wandb.init(
            project=config.log.wandb_project,
            name=run.name,
            id=identity,
            resume="allow",
            dir=str(run),
            config=config_to_table(config),
        )

    def write(self, row: Row) -> None:
        """A scalar for each number."""
        self._run.log(dict(_scalars(row)), step=row["step"])

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


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
