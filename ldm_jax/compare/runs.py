"""The finished runs of a comparison: one CSV row each, so that later work goes on from them."""

import csv
import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ldm_jax.config import Config
from ldm_jax.config.toml import config_to_toml, options_in_use, read_config
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically
from ldm_jax.train.metrics import read_metrics

Curve = tuple[tuple[int, float], ...]
"""Validation loss by step."""


@dataclass(frozen=True)
class Run:
    """A method's config at a rate and a seed."""

    method: str
    config: Config

    @property
    def learning_rate(self) -> float:
        """The highest rate."""
        return self.config.optimizer.learning_rate

    @property
    def seed(self) -> int:
        """Of the parameters and of the order of the data."""
        return self.config.train.seed

    @property
    def config_hash(self) -> str:
        """Eight hexadecimal digits of all that the run depends on: not the mesh, nor options of other mixers."""
        options = {name: table for name, table in options_in_use(self.config).items() if name != "mesh"}
        text = json.dumps(options, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.method}-lr{self.learning_rate:g}-seed{self.seed}-{self.config_hash}"


def make_run(method: str, config: Config, learning_rate: float, seed: int) -> Run:
    """The run of a method's config at this rate and seed."""
    optimizer = dataclasses.replace(config.optimizer, learning_rate=learning_rate)
    train = dataclasses.replace(config.train, seed=seed)
    return Run(method, dataclasses.replace(config, optimizer=optimizer, train=train))


@dataclass(frozen=True)
class FinishedRun:
    """What is kept of a run. A loss that was not finite ends a run: its losses are infinite."""

    config_hash: str
    method: str
    seed: int
    learning_rate: float
    steps: int
    training_loss: float
    """Mean of the logged losses of the last tenth of the steps; nats a token."""
    validation_loss: float
    """At the end; nats a token."""
    seconds: float
    validation_curve: Curve

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite."""
        return math.isinf(self.validation_loss)


def finished_run(run: Run, folder: Path) -> FinishedRun:
    """The row of a run from the metrics in its folder.

    Raises:
        UserError: the run is not finished.
    """
    steps = run.config.train.steps
    rows = read_metrics(folder / "metrics.jsonl")
    curve = tuple((int(row["step"]), float(row["validation_loss"])) for row in rows if "validation_loss" in row)
    training = [row for row in rows if "loss" in row]
    if not curve or curve[-1][0] < steps:
        raise UserError(f"the run in {folder} is not finished: start the comparison again.")
    last = [row["loss"] for row in training if row["step"] > 0.9 * steps]
    loss = sum(last) / len(last)
    return _row(run, loss, curve[-1][1], training[-1]["seconds"], curve)


def diverged_run(run: Run) -> FinishedRun:
    """The row of a run that ended with a loss that was not finite."""
    return _row(run, math.inf, math.inf, math.nan, ())


def _row(run: Run, training: float, validation: float, seconds: float, curve: Curve) -> FinishedRun:
    steps = run.config.train.steps
    names = run.config_hash, run.method, run.seed, run.learning_rate, steps
    return FinishedRun(*names, round(training, 6), round(validation, 6), round(seconds, 1), curve)


_COLUMNS = [field.name for field in dataclasses.fields(FinishedRun)]


def read_finished(file: Path) -> list[FinishedRun]:
    """The rows of a file; none if there is no file.

    Raises:
        UserError: the file is not such a table.
    """
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as text:
        reader = csv.DictReader(text)
        if reader.fieldnames != _COLUMNS:
            raise UserError(f"{file} has not the columns {', '.join(_COLUMNS)}: it is no table of finished runs.")
        try:
            return [_parse(row) for row in reader]
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{file} holds a row that cannot be read: {error}.") from error


def write_finished(file: Path, rows: list[FinishedRun]) -> None:
    """Writes all rows, in order of method, rate and seed. Raises UserError if the file cannot be written."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in sorted(rows, key=lambda row: (row.method, row.learning_rate, row.seed, row.config_hash)):
        *plain, curve = dataclasses.astuple(row)
        writer.writerow([*plain, " ".join(f"{step}:{loss:.5f}" for step, loss in curve)])
    try:
        write_atomically(file, text.getvalue())
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}.") from error


def _parse(row: dict[str, str]) -> FinishedRun:
    points = (point.split(":") for point in row["validation_curve"].split())
    curve = tuple((int(step), float(loss)) for step, loss in points)
    numbers = int(row["seed"]), float(row["learning_rate"]), int(row["steps"])
    losses = float(row["training_loss"]), float(row["validation_loss"]), float(row["seconds"])
    return FinishedRun(row["config_hash"], row["method"], *numbers, *losses, curve)


def store_methods(folder: Path, methods: Mapping[str, Config]) -> None:
    """Keeps the configs with the comparison, so that it can be reported again. Raises UserError if it can't."""
    try:
        (folder / "methods").mkdir(parents=True, exist_ok=True)
        for method, config in methods.items():
            write_atomically(folder / "methods" / f"{method}.toml", config_to_toml(config))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from error


def stored_methods(folder: Path) -> dict[str, Config]:
    """What `store_methods` kept. Raises UserError if there is nothing."""
    files = sorted((folder / "methods").glob("*.toml"))
    if not files:
        raise UserError(f"{folder} holds no comparison: give a folder that scripts/compare.py has written.")
    return {file.stem: read_config(file) for file in files}
