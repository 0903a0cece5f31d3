"""A run's folder: its config, its metrics, its checkpoints, its sample."""

import dataclasses
import fcntl
from pathlib import Path

from etils import epath

from ldm_jax.config import Config
from ldm_jax.config.toml import config_to_toml, options_by_name, read_config
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically

CHANGEABLE = ("optimizer", "train", "log")

MARK = "# The whole config of this run, written by ldm_jax.\n"


class RunDirectory:
    """A folder that holds one run; locked from `open` to `close`."""

    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.toml"
        self.metrics_file = path / "metrics.jsonl"
        self.sample_file = path / "sample.txt"
        self._lock = None

    def open(self, config: Config) -> list[str]:
        """Makes the folder, or finds the same run in it. Returns what changed since, in phrases.

        The model, the mixer and the data of a run cannot change, nor its seed and what its state consists of; the rest
        of `optimizer`, `train` and `log` can.

        Raises:
            UserError: the folder holds another model or other files, is in use, or cannot be written.
        """
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
        """Stores the config that the run goes on with. Raises UserError if it cannot be written."""
        try:
            write_atomically(self.config_file, MARK + config_to_toml(config))
        except OSError as error:
            raise UserError(f"{self.config_file} cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        """Lets other processes have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _acquire(self) -> None:
        ours = {".lock", "config.toml.tmp"}  # what a start that was killed can leave
        foreign = [entry.name for entry in self.path.iterdir() if entry.name not in ours]
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
        # How the data is checked is not what it is.
        stored = dataclasses.replace(stored, data=dataclasses.replace(stored.data, verify=config.data.verify))
        for section in ("model", "mixer", "data"):
            if differences := _differences(section, getattr(stored, section), getattr(config, section)):
                raise UserError(
                    f"{self.path} holds another model: {differences[0]}. Give another --run, or take back the change."
                )
        for name, why, old, new in (
            ("train.seed", "change the order of the data", stored.train.seed, config.train.seed),
            ("optimizer.name", "need another state", stored.optimizer.name, config.optimizer.name),
            ("optimizer.ema > 0", "need another state", stored.optimizer.ema > 0, config.optimizer.ema > 0),
        ):
            if old != new:
                raise UserError(
                    f"{name} was {old} and is now {new}, which would {why}: take that back, or give another --run."
                )
        return [
            phrase
            for section in CHANGEABLE
            for phrase in _differences(section, getattr(stored, section), getattr(config, section))
        ]


def checkpoints_folder(config: Config, path: Path) -> epath.Path:
    """Where the checkpoints of the run in a folder are; it may be a bucket."""
    return epath.Path(config.train.checkpoints or path / "checkpoints")


def _is_run(path: Path) -> bool:
    """Whether the folder's config was written by `store`, not by a user."""
    file = path / "config.toml"
    return file.is_file() and file.read_bytes().startswith(MARK.encode())


def stored_config(path: Path) -> Config:
    """The config of the run in a folder.

    Raises:
        UserError: the folder holds no run.
    """
    if not _is_run(path):
        raise UserError(f"{path} holds no run: give a folder that scripts/train.py has written.")
    return read_config(path / "config.toml")


def _differences(section: str, old: object, new: object) -> list[str]:
    """A phrase for each option that differs."""
    current = options_by_name(new, section)
    return [
        f"{name} was {was} and is now {current[name]}"
        for name, was in options_by_name(old, section).items()
        if was != current[name]
    ]
