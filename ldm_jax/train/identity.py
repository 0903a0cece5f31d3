"""The identity of a run: kept in its directory and in its store of checkpoints, so that no two runs share either."""

import json
import uuid
from pathlib import Path
from typing import NamedTuple

from etils import epath

from ldm_jax.errors import UserError

RUN_FILE, STORE_FILE = ".lock", ".run"
"""The files that hold the identity, in a run's directory and in a store. They are locked in training, if local."""


class Identity(NamedTuple):
    """A run, as it is named in its directory and in its store of checkpoints."""

    id: str
    """Random, made when the run is started."""
    run: str
    """The run's directory at its last start."""


def make_identity(run: str) -> Identity:
    """A new identity for the run in a directory."""
    return Identity(uuid.uuid4().hex, run)


def read_identity(file: epath.PathLike) -> Identity | None:
    """The identity in a file; None if the file does not exist, or is empty as in runs of earlier versions."""
    try:
        return Identity(**json.loads(epath.Path(file).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_identity(file: epath.PathLike, identity: Identity) -> None:
    """Writes the identity into a file in place, because the file may be locked."""
    epath.Path(file).write_text(json.dumps(identity._asdict()))


def check_store(store: epath.Path, run: Path, own: Identity | None) -> Identity | None:
    """The identity in a store of checkpoints, for a run with its own identity; None if no run has claimed the store.

    A run's directory without identity is new, or it was lost and is made again. It may use the checkpoints in itself,
    and those of a run whose directory has the same name.

    Raises:
        UserError: the store holds the checkpoints of another run.
    """
    found = read_identity(store / STORE_FILE)
    if found is None or (own is not None and own.id == found.id):
        return found
    inside = Path(store).absolute().parent == run.absolute()
    if own is None and (inside or Path(found.run).name == run.absolute().name):
        return found
    raise UserError(
        f"{store} holds the checkpoints of the run {found.run}, not of {run}: give another train.checkpoints, or "
        f"--run {found.run}."
    )
