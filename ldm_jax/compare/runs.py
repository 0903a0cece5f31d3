"""The runs of a comparison and their results: one row of `runs.csv` for each finished run."""

import csv
import dataclasses
import hashlib
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

from ldm_jax.config import Config
from ldm_jax.config.toml import ADDED_OPTIONS, REMOVED_OPTIONS, options_by_name
from ldm_jax.errors import UserError
from ldm_jax.files import save_text
from ldm_jax.train.metrics import read_metrics

Curve = tuple[tuple[int, float], ...]
"""Validation loss by step."""
Key = tuple[str, float, int]
"""Method, learning rate and seed: within a comparison they identify a run."""

OWN_FILES = {
    ".lock", "runs", "runs.csv", "costs.json", "results.csv", "results.md",
    "curves.png", "final_losses.png", "loss_against_compute.png",
}  # fmt: skip
"""What the directory of a comparison holds."""


def check_directory(directory: Path) -> None:
    """Raises UserError if the directory holds other files than those of a comparison, and no comparison."""
    if (directory / "runs.csv").exists() or not directory.is_dir():
        return
    names = (entry.name for entry in directory.iterdir())
    if foreign := sorted(name for name in names if name.removesuffix(".tmp") not in OWN_FILES):
        raise UserError(
            f"{directory} holds other files ({', '.join(foreign[:3])}) and no comparison: give another directory as "
            "--out."
        )


def config_hash(config: Config) -> str:
    """Eight hexadecimal digits of the options that a method's runs depend on.

    Learning rate and seed are left out, as a method has runs at several; so are the mesh and the options of mixers that
    are not used.
    """
    # Options at their defaults are included. Otherwise a default that changes would give the new model the old model's
    # hash, and rows of the one would count as rows of the other. Options that have been removed are included at the
    # value that the code always has now, so removing an option changes no hash. An option that is added later, with a
    # default other than None, is left out at the value that stands for what the code did before.
    options = REMOVED_OPTIONS | options_by_name(config)
    tables = "model", "mixer", f"mixer.{options['mixer.kind']}", "data", "optimizer", "train", "log"
    used = {
        name: value
        for name, value in options.items()
        if value is not None
        and value != ADDED_OPTIONS.get(name)
        and name.rpartition(".")[0] in tables
        and name not in ("optimizer.learning_rate", "train.seed")
    }
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Run:
    """A method's config at a learning rate and a seed."""

    method: str
    config: Config

    @property
    def key(self) -> Key:
        """What identifies the run in a comparison."""
        return self.method, self.config.optimizer.learning_rate, self.config.train.seed

    @property
    def config_hash(self) -> str:
        """Hash of the method's config."""
        return config_hash(self.config)

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        method, rate, seed = self.key
        return f"{method}-lr{rate:g}-seed{seed}-{self.config_hash}"


def make_run(method: str, config: Config, learning_rate: float, seed: int) -> Run:
    """The run of a method's config at this rate and seed."""
    optimizer = dataclasses.replace(config.optimizer, learning_rate=learning_rate)
    train = dataclasses.replace(config.train, seed=seed)
    return Run(method, dataclasses.replace(config, optimizer=optimizer, train=train))


@dataclass(frozen=True)
class RunResult:
    """A row of `runs.csv`. The losses of a run that diverged are infinite."""

    config_hash: str
    method: str
    seed: int
    learning_rate: float
    steps: int
    training_loss: float
    """Mean of the logged losses of the last tenth of the steps, in nats per token."""
    validation_loss: float
    """After the last step, in nats per token."""
    seconds: float
    validation_curve: Curve

    @property
    def key(self) -> Key:
        """What identifies the run in a comparison."""
        return self.method, self.learning_rate, self.seed

    @property
    def diverged(self) -> bool:
        """Whether training stopped because it was not finite."""
        return math.isinf(self.validation_loss)


def finished_result(run: Run, directory: Path) -> RunResult:
    """Reads the result of a run from the metrics in its directory. Raises UserError if the run is not finished."""
    steps = run.config.train.steps
    rows = read_metrics(directory / "metrics.jsonl")
    curve = tuple((int(row["step"]), float(row["validation_loss"])) for row in rows if "validation_loss" in row)
    training = [row for row in rows if "loss" in row]
    if not curve or curve[-1][0] < steps:
        raise UserError(f"the run in {directory} is not finished: start the comparison again.")
    last = [row["loss"] for row in training if row["step"] > 0.9 * steps]
    loss = sum(last) / len(last)
    return _result(run, loss, curve[-1][1], training[-1]["seconds"], curve)


def diverged_result(run: Run) -> RunResult:
    """The result of a run that diverged."""
    return _result(run, math.inf, math.inf, math.nan, ())


def _result(run: Run, training: float, validation: float, seconds: float, curve: Curve) -> RunResult:
    method, rate, seed = run.key
    figures = round(training, 6), round(validation, 6), round(seconds, 1)
    return RunResult(run.config_hash, method, seed, rate, run.config.train.steps, *figures, curve)


_COLUMNS = [field.name for field in dataclasses.fields(RunResult)]


def read_runs(file: Path) -> list[RunResult]:
    """Reads `runs.csv`; no rows if there is none. Raises UserError for another table, or two configs of one method."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8-sig") as text:
        reader = csv.DictReader(text)
        if reader.fieldnames != _COLUMNS:
            raise UserError(f"{file} has the columns {reader.fieldnames}, but they must be {', '.join(_COLUMNS)}.")
        try:
            rows = [_parse(row) for row in reader]
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{file} has a row that cannot be read: {error}.") from error
    hashes = {row.method: row.config_hash for row in rows}
    for row in rows:
        if row.config_hash != hashes[row.method]:
            raise UserError(
                f"{file} has rows of {row.method} with different config hashes: remove those of one config."
            )
    return rows


def write_runs(file: Path, rows: list[RunResult]) -> None:
    """Writes `runs.csv`, sorted by method, rate and seed. Raises UserError if the file cannot be written."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in sorted(rows, key=lambda row: row.key):
        *plain, curve = dataclasses.astuple(row)
        writer.writerow([*plain, " ".join(f"{step}:{loss:.5f}" for step, loss in curve)])
    save_text(file, text.getvalue())


def _parse(row: dict[str, str]) -> RunResult:
    points = (point.split(":") for point in row["validation_curve"].split())
    curve = tuple((int(step), float(loss)) for step, loss in points)
    numbers = int(row["seed"]), float(row["learning_rate"]), int(row["steps"])
    losses = float(row["training_loss"]), float(row["validation_loss"]), float(row["seconds"])
    return RunResult(row["config_hash"], row["method"], *numbers, *losses, curve)
