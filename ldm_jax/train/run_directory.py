"""The directory of a run: its config, metrics, checkpoints and sample."""

import dataclasses
import fcntl
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from etils import epath
from flax import nnx

from ldm_jax.config import Config
from ldm_jax.config.toml import config_to_toml, options_by_name, read_config
from ldm_jax.data import Tokenizer, load_tokenizer
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically
from ldm_jax.nn import Params, Transformer, model_graph
from ldm_jax.train.checkpoints import Checkpoints
from ldm_jax.train.step import make_state
from ldm_jax.train.storage import storage_path

CHANGEABLE = ("optimizer", "train", "log")
"""Sections of the config whose options may change between two starts of a run."""
MARK = "# The whole config of this run, written by ldm_jax.\n"
"""The first line of a run's config, by which its directory is recognised."""


class RunDirectory:
    """The directory of one run, locked from `open` to `close`."""

    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.toml"
        self.sample_file = path / "sample.txt"
        self._lock = None

    def open(self, config: Config) -> list[str]:
        """Creates the directory, or finds the same run in it. Returns a phrase for each option that has changed.

        Options of `optimizer`, `train` and `log` may change. The model, the mixer, the data, the seed and what decides
        the structure of the optimiser's state may not.

        Raises:
            UserError: the directory holds another model or other files, is in use, or cannot be written.
        """
        if re.match(r"\w+:/", str(self.path)) is not None:
            raise UserError(
                f"the run directory is {self.path}, but only checkpoints can be in a bucket: give a local --run, and "
                "set train.checkpoints to the bucket."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire()
            return self._compare(config)
        except OSError as error:
            self.close()
            raise UserError(f"the run directory {self.path} cannot be written: {error.strerror}.") from error
        except UserError:
            self.close()
            raise

    def store(self, config: Config) -> None:
        """Writes config.toml. Raises UserError if it cannot be written."""
        try:
            write_atomically(self.config_file, MARK + config_to_toml(config))
        except OSError as error:
            raise UserError(f"{self.config_file} cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _acquire(self) -> None:
        own = {".lock", "config.toml.tmp"}  # left by a start that was killed early
        foreign = [entry.name for entry in self.path.iterdir() if entry.name not in own]
        if foreign and not _is_run(self.path):
            raise UserError(
                f"{self.path} holds other files ({', '.join(sorted(foreign)[:3])}) and no run: give another --run."
            )
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is training in {self.path}: wait for it, or give another --run."
            ) from None

    def _compare(self, config: Config) -> list[str]:
        if not self.config_file.exists():
            return []
        stored = read_config(self.config_file)
        # data.verify does not change the data.
        stored = dataclasses.replace(stored, data=dataclasses.replace(stored.data, verify=config.data.verify))
        for section in ("model", "mixer", "data"):
            if differences := _differences(section, getattr(stored, section), getattr(config, section)):
                raise UserError(
                    f"{self.path} holds another model: {differences[0]}. Give another --run, or undo the change."
                )
        for name, why, old, new in (
            ("train.seed", "change the order of the data", stored.train.seed, config.train.seed),
            ("optimizer.name", "need another optimiser state", stored.optimizer.name, config.optimizer.name),
            ("optimizer.ema > 0", "need another state", stored.optimizer.ema > 0, config.optimizer.ema > 0),
        ):
            if old != new:
                raise UserError(
                    f"{name} was {old} and is now {new}, which would {why}: undo the change, or give another --run."
                )
        return [
            phrase
            for section in CHANGEABLE
            for phrase in _differences(section, getattr(stored, section), getattr(config, section))
        ]


def checkpoint_directory(config: Config, path: Path) -> epath.Path:
    """Where the run in the directory `path` has its checkpoints; this may be a bucket."""
    return storage_path(config.train.checkpoints or path / "checkpoints")


def _is_run(path: Path) -> bool:
    """Whether config.toml was written by `store`, not by a user."""
    file = path / "config.toml"
    return file.is_file() and file.read_bytes().startswith(MARK.encode())


def _differences(section: str, old: object, new: object) -> list[str]:
    """A phrase for each option that differs."""
    current = options_by_name(new, section)
    return [
        f"{name} was {was} and is now {current[name]}"
        for name, was in options_by_name(old, section).items()
        if was != current[name]
    ]


class TrainedRun(NamedTuple):
    """The last checkpoint of a run, for evaluation and sampling; `nnx.merge(graph, params)` is the model."""

    config: Config
    step: int
    graph: nnx.GraphDef[Transformer]
    params: Params
    tokenizer: Tokenizer
    corpus: str
    """Fingerprint of the corpus that the model was trained on."""


def load_run(path: Path) -> TrainedRun:
    """Loads the last checkpoint of the run in a directory.

    Raises:
        UserError: the directory holds no run, or the run has no checkpoint yet.
    """
    if not _is_run(path):
        raise UserError(f"{path} holds no run: give a directory that scripts/train.py has written.")
    config = read_config(path / "config.toml")
    keep = config.train.keep_checkpoints, config.train.keep_every
    checkpoints = Checkpoints(checkpoint_directory(config, path), *keep)
    try:
        restored = checkpoints.restore_latest(make_state(config))
    finally:
        checkpoints.close()
    if restored is None:
        raise UserError(
            f"the run in {path} has no checkpoint yet: the first is saved after train.checkpoint_every "
            f"({config.train.checkpoint_every}) steps."
        )
    state, progress, warnings = restored
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        for name, text in progress.tokenizer.items():
            (Path(directory) / name).write_bytes(text.encode())
        tokenizer = load_tokenizer(Path(directory))
    graph = model_graph(config.model, config.mixer)
    return TrainedRun(config, int(state.step), graph, state.eval_params, tokenizer, progress.corpus)
