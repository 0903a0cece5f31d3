"""The directory of a run: its config, metrics, checkpoints and sample, and its identity.

The identity is kept in the directory and in the store of checkpoints, so that no two runs share either.
"""

import contextlib
import json
import re
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

import jax
from etils import epath
from jax.sharding import Mesh, SingleDeviceSharding

from ldm_jax.config import Config, ModelConfig
from ldm_jax.config.toml import read_config
from ldm_jax.errors import UserError
from ldm_jax.files import acquire_lock, name_aside, save_text, writing
from ldm_jax.mixers import MixerConfig
from ldm_jax.nn import Params, init_params, model_declarations
from ldm_jax.parallel import first_failure, is_leader
from ldm_jax.parameters import shardings
from ldm_jax.runs.changes import find_changes
from ldm_jax.runs.checkpoints import Checkpoints, SavedParams, holds_checkpoints
from ldm_jax.runs.device import adapt
from ldm_jax.runs.storage import PROBE_FILE, STORE_FILE, storage_path

MARK = "# The whole config of this run, written by ldm_jax.\n"
"""The first line of a run's config."""
RUN_FILE = ".lock"
"""The file in a run's directory that holds its identity, and is locked in training."""


class Identity(NamedTuple):
    """A run, as it is named in its directory and in its store of checkpoints."""

    id: str
    """Random, made when the run is started."""
    run: str
    """The run's directory at its last start."""


def read_identity(file: epath.PathLike) -> Identity | None:
    """The identity in a file; None if the file does not exist, or is empty as in runs of earlier versions."""
    try:
        return Identity(**json.loads(epath.Path(file).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def check_store(store: epath.Path, run: Path, own: Identity | None, copied: bool = False) -> Identity | None:
    """The identity in a store of checkpoints, for a run with its own identity; None if no run has claimed the store.

    A run's directory without identity is new, or it was lost and is made again. It may use the checkpoints in itself.
    Unless it is a copy, it may also use those of a run whose directory had the same name and is gone.

    Raises:
        UserError: the store holds the checkpoints of another run.
    """
    found = read_identity(store / STORE_FILE)
    if found is None or (own is not None and own.id == found.id):
        return found
    inside = Path(store).absolute().parent == run.absolute()
    gone = read_identity(Path(found.run) / RUN_FILE) is None
    if own is None and (inside or (gone and not copied and Path(found.run).name == run.absolute().name)):
        return found
    raise UserError(
        f"{store} holds the checkpoints of the run {found.run}, not of {run}: give another train.checkpoints, or "
        f"--run {found.run}."
    )


class RunDirectory:
    """The directory of one run, locked from `open` to `close`."""

    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.toml"
        self.sample_file = path / "sample.txt"
        self.lock_file = path / RUN_FILE
        self._lock = None

    def open(self) -> None:
        """Makes or finds the directory; locks it. Raises UserError if it holds other files, is in use or read-only."""
        if re.match(r"\w+:/", str(self.path)) is not None:
            raise UserError(
                f"the run directory is {self.path}, but only checkpoints can be in a bucket: give a local --run, and "
                "set train.checkpoints to the bucket."
            )
        with writing(f"the run directory {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            foreign = [entry.name for entry in self.path.iterdir() if not _is_early(entry)]
            if foreign and not _is_run(self.path):
                raise UserError(
                    f"{self.path} holds other files ({', '.join(sorted(foreign)[:3])}) and no run: give another --run."
                )
            self._lock = acquire_lock(self.lock_file, "training in", "--run")

    def claim(self, checkpoints: Checkpoints, config: Config, corpus: str) -> list[str]:
        """Takes the store of checkpoints for this run, whose text has the fingerprint `corpus`.

        Until then, nothing in the store has been changed.

        Returns:
            A phrase for each option that has changed since the last checkpoint.

        Raises:
            UserError: the checkpoints are those of another run or another model, or are being written.
        """
        store, here = checkpoints.directory, str(self.path.absolute())
        own = read_identity(self.lock_file)
        copied = own is not None and _is_copy(self.path, own)
        own = None if copied else own
        check_store(store, self.path, own, copied)  # names the other run, if it is being trained
        checkpoints.lock()
        found = check_store(store, self.path, own, copied)
        known = None if copied else found or own
        identity = Identity(uuid.uuid4().hex, here) if known is None else known._replace(run=here)
        changes: list[str] = []
        if (saved := checkpoints.last_config()) is not None:
            saved_config, saved_corpus = saved
            model, text, others = find_changes(saved_config, config, trained=bool(saved_corpus))
            changes = [*text, *others]
            if model or (text and saved_corpus != corpus):
                what, change = ("model", model[0]) if model else ("text", text[0])
                raise UserError(
                    f"{store} holds checkpoints of another {what}: {change}. Undo the change, or give another --run."
                )
            if found is None and changes and not _is_run(self.path):
                raise UserError(
                    f"{store} holds checkpoints of an earlier version, which do not name their run, and the new run "
                    f"differs: {changes[0]}. Undo the change if they are its own, or give another train.checkpoints."
                )
        for file in (self.lock_file, store / STORE_FILE):
            with writing(file):  # in place, because the file may be locked
                epath.Path(file).write_text(json.dumps(identity._asdict()))
        return changes

    def check_former_store(self, config: Config) -> None:
        """Raises UserError if the run's checkpoints are in the store of its last start, and not in that of `config`."""
        if (last := _written(self.config_file)) is None:
            return
        former, store = (checkpoint_directory(each, self.path) for each in (last, config))
        if former != store and holds_checkpoints(former) and not holds_checkpoints(store):
            raise UserError(
                f"the checkpoints of the run {self.path} are in {former}, but train.checkpoints is now {store}, which "
                f"has none: move the directory, as in mv {former} {store}, or undo the change."
            )

    def store(self, config: str) -> None:
        """Writes config.toml, a config as TOML. Raises UserError if it cannot be written."""
        save_text(self.config_file, MARK + config)

    def restore_config(self, config: str, is_new: bool) -> list[str]:
        """Writes config.toml if it is lost or broken. Returns a sentence, unless the run is new. Raises UserError."""
        file = self.config_file
        if _written(file) is not None:
            return []
        note = [] if is_new else [f"{file} was lost: it is written again."]
        try:
            if file.exists():
                file.rename(kept := name_aside(file))
                note = [f"{file} could not be read: it is now {kept}, and {file.name} is written again."]
        except OSError as error:
            raise UserError(f"{file} cannot be renamed: {error.strerror}.") from error
        self.store(config)
        return note

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def checkpoint_directory(config: Config, path: Path) -> epath.Path:
    """Where the run in the directory `path` has its checkpoints; this may be a bucket."""
    return storage_path(config.train.checkpoints or path / "checkpoints")


def _written(file: Path) -> Config | None:
    """The config in a file that `RunDirectory.store` has written; None if there is none that can be read."""
    try:
        return read_config(file) if file.read_bytes().startswith(MARK.encode()) else None
    except (OSError, UserError):
        return None


def _is_copy(path: Path, own: Identity) -> bool:
    """Whether the directory of this identity still exists elsewhere, so that it was not moved."""
    found = read_identity(Path(own.run) / RUN_FILE)
    return found is not None and found.id == own.id and not path.samefile(own.run)


def _is_run(path: Path) -> bool:
    """Whether a directory is that of a run, even if its config is lost."""
    file = path / "config.toml"
    marked = file.is_file() and file.read_bytes().startswith(MARK.encode())
    return marked or read_identity(path / RUN_FILE) is not None or holds_checkpoints(epath.Path(path / "checkpoints"))


def _is_early(entry: Path) -> bool:
    """Whether a file or directory can be from a start that was killed before the directory was marked as a run."""
    store = entry.name == "checkpoints" and entry.is_dir()
    if store:
        return all(each.name == STORE_FILE or each.name.startswith(PROBE_FILE) for each in entry.iterdir())
    return entry.name in (RUN_FILE, "config.toml.tmp")


class SavedRun(NamedTuple):
    """A checkpoint of a run."""

    path: Path
    """Directory of the run."""
    config: Config
    """The run's config, for this device."""
    saved: SavedParams


def read_run(path: Path, mesh: Mesh | None = None) -> SavedRun:
    """Reads the parameters to evaluate from a checkpoint of a run, whose directory does not change.

    Options that this device does not support are replaced by equivalent ones, and a lost or broken config.toml by the
    config of the last checkpoint. A line on stderr reports each.

    Args:
        path: RUN for the last checkpoint of the run in this directory, or RUN@STEP for that of a step.
        mesh: where the parameters are placed; None for one device. All processes of a job call this together.

    Raises:
        UserError: the directory holds no run, or the run has no such checkpoint.
    """
    path, step = _split_step(path)
    config = _written(path / "config.toml")
    store = epath.Path(path / "checkpoints") if config is None else checkpoint_directory(config, path)
    every = "" if config is None else f" ({config.train.checkpoint_every})"
    none = f"the run in {path} has no checkpoint yet: the first is saved after train.checkpoint_every{every} steps."
    if not _is_run(path):
        failure = (
            f"{path} holds no run: give a directory that scripts/train.py, import_hf.py or export_hf.py has written, "
            "or that of a Hugging Face checkpoint."
        )
    else:
        failure = None if holds_checkpoints(store) else none
    if (failure := first_failure(failure)) is not None:
        raise UserError(failure)
    with contextlib.closing(Checkpoints(store, keep=1)) as checkpoints:
        check_store(checkpoints.directory, path, read_identity(path / RUN_FILE))
        last = checkpoints.last_config()
        if last is not None and (config is None or find_changes(last[0], config, trained=bool(last[1])).model):
            file = path / "config.toml"
            _print(f"warning: {file} is lost, broken or of another model: the config of the last checkpoint is used.")
            config = last[0]
        config = adapt_config(read_config(path / "config.toml") if config is None else config)
        restored = checkpoints.restore_params(param_shapes(config.model, config.mixer, mesh), step)
    if restored is None:
        raise UserError(none)
    saved, warnings = restored
    for warning in warnings:
        _print(f"warning: {warning}")
    return SavedRun(path, config, saved)


def adapt_config(config: Config) -> Config:
    """The config for this device, as `adapt`; a line on stderr reports each option that is replaced."""
    config, replaced = adapt(config)
    for why, new in replaced.items():
        _print(f"note: {why}: {new} is used.")
    return config


def _split_step(path: Path) -> tuple[Path, int | None]:
    """The directory and the step of RUN@STEP. A directory that has such a name is a run."""
    match = re.fullmatch(r"(.+)@(\d+)", str(path))
    return (path, None) if match is None or path.is_dir() else (Path(match[1]), int(match[2]))


def param_shapes(model: ModelConfig, mixer: MixerConfig, mesh: Mesh | None = None) -> Params:
    """The parameters as `jax.ShapeDtypeStruct`s with shardings: on the mesh, or on one device."""
    shapes = jax.eval_shape(lambda: init_params(model, mixer, 0))
    if mesh is None:
        places = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), shapes)
    else:
        places = shardings(shapes, mesh, model_declarations(model, mixer))
    return jax.tree.map(lambda shape, place: shape.update(sharding=place), shapes, places)


def _print(line: str) -> None:
    if is_leader():
        print(line, file=sys.stderr)
