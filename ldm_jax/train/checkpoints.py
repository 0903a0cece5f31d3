"""Checkpoints of a run: written whole or not at all."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from ldm_jax.errors import UserError
from ldm_jax.train.step import TrainState

SPARE_BYTES = 2_000_000  # beside the arrays: their index, their metadata, the metrics


class Progress(NamedTuple):
    """What a run knows beside the training state."""

    seconds: float
    """Time spent, over all starts."""
    corpus: str
    """Fingerprint of the corpus."""


class Checkpoints:
    """The checkpoints in a folder, one subfolder a step; the latest `keep` are kept."""

    def __init__(self, folder: Path, keep: int):
        self._folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest_step(self) -> int | None:
        """The step of the newest whole checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, progress: Progress) -> None:
        """Writes a checkpoint; when this returns, it is whole.

        Raises:
            UserError: it could not be written, for example because the disk is full; earlier ones are untouched.
        """
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state._asdict()),  # pyright: ignore[reportCallIssue]
            progress=ocp.args.JsonSave(progress._asdict()),  # pyright: ignore[reportCallIssue]
        )
        try:
            self._check_space(state)
            if not self._manager.save(step, args=items):
                raise OSError(f"the folder has a checkpoint of step {self.latest_step()} already")
        except Exception as error:  # the storage layer raises types of its own
            kept = self.latest_step()
            raise UserError(
                f"the checkpoint of step {step} could not be written to {self._folder}: {_first_line(error)} "
                + ("There is no earlier one." if kept is None else f"The one of step {kept} is kept.")
                + " Free some space and start again with the same command."
            ) from error

    def _check_space(self, state: TrainState) -> None:
        # Asked beforehand, because the storage layer's threads fill the screen when a write of theirs fails.
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + SPARE_BYTES
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise OSError(f"it needs {needed / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB left")

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, Progress]:
        """The state and progress of a step, with the shapes and types of `like`.

        Raises:
            UserError: the checkpoint cannot be read, or is of another model.
        """
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(target),  # pyright: ignore[reportCallIssue]
            progress=ocp.args.JsonRestore(),
        )
        try:
            restored = self._manager.restore(step, args=items)
        except Exception as error:
            raise UserError(
                f"the checkpoint of step {step} in {self._folder} cannot be read: {_first_line(error)} "
                "Remove its folder to go on from the one before."
            ) from error
        return TrainState(**restored["state"]), Progress(**restored["progress"])

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()


def _first_line(error: BaseException) -> Any:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".") + "."
