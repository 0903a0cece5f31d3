"""Checkpoints of a run: written beside the training, whole or not at all, and checked when they are read."""

import hashlib
import itertools
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from ldm_jax.errors import UserError
from ldm_jax.train.fingerprint import fingerprint
from ldm_jax.train.step import TrainState

SPARE_BYTES = 2_000_000  # beside the arrays: their index, their metadata, the metrics


class Progress(NamedTuple):
    """What a checkpoint holds beside the training state. All of it is numbers and text."""

    windows: int
    """Training windows consumed: the position in the data, whatever the batch size and the number of hosts."""
    seconds: float
    """Time spent, over all starts."""
    corpus: str
    """Fingerprint of the corpora."""
    config: str
    """The whole config, as TOML."""
    tokenizer: dict[str, str]
    """The tokeniser's files, by name."""


class Checkpoints:
    """The checkpoints in a folder, one subfolder a step: the latest `keep`, and every step that `keep_every` divides.

    One is written by other threads while training goes on. What goes wrong is returned as a sentence, so that training
    need not end for it.
    """

    def __init__(self, folder: Path, keep: int, keep_every: int | None = None):
        self._folder = folder.absolute()
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every, enable_async_checkpointing=True
        )
        logging.getLogger("absl").addFilter(_not_of_storage)
        self._manager = ocp.CheckpointManager(self._folder, options=self._options)
        self._saving: int | None = None

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint that was written to its end, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, progress: Progress) -> str | None:
        """Starts to write a checkpoint, after a `wait` for the one before; the state may change at once.

        Returns why it cannot be written, as a sentence, or None. What was written earlier is untouched.
        """
        try:
            self._check_space(state)
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(_saved(state)),  # pyright: ignore[reportCallIssue]
                progress=ocp.args.JsonSave(progress._asdict()),  # pyright: ignore[reportCallIssue]
                fingerprint=ocp.args.JsonSave(_fingerprint(state, progress)),  # pyright: ignore[reportCallIssue]
            )
            if not self._manager.save(step, args=items):
                raise OSError(f"the folder has a checkpoint of step {self.latest_step()} already")
            self._saving = step
        except Exception as error:  # the storage layer raises types of its own
            return self._failed(step, error)
        return None

    def wait(self) -> str | None:
        """Waits until the last checkpoint is written. Returns why it could not be, or None."""
        step, self._saving = self._saving, None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            return self._failed(step, error)
        return None

    def remove_leftovers(self) -> None:
        """Removes what a save that was broken off has left. Only for the one process that trains."""
        for leftover in self._folder.glob("*.orbax-checkpoint-tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _failed(self, step: int | None, error: Exception) -> str:
        self.remove_leftovers()
        self._manager.reload()  # it counts the failed one among those that there are
        kept = self.latest_step()
        return f"the checkpoint of step {step} could not be written to {self._folder}: {_reason(error)} " + (
            "There is no earlier one." if kept is None else f"The one of step {kept} is kept."
        )

    def _check_space(self, state: TrainState) -> None:
        # Asked beforehand: a write that fails halfway has cost its time.
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + SPARE_BYTES
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise OSError(f"it needs {needed / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB left")

    def restore_latest(self, like: TrainState) -> tuple[TrainState, Progress, list[str]] | None:
        """The state and progress of the newest checkpoint that is whole; None if there is no checkpoint at all.

        One that cannot be read, or whose content is not what was written, is passed over, and a sentence for it is
        among those returned. Nothing on disk changes: another process may be training there.

        Args:
            like: a state of the shapes and types wanted.

        Raises:
            UserError: there are checkpoints, but none is whole or of this model.
        """
        warnings: list[str] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                state, progress = self._restore(step, like)
            except Exception as error:
                if not (self._folder / str(step)).exists():  # another process trains, and keeps the latest only
                    self._manager.reload()
                    return self.restore_latest(like)
                warnings.append(f"the checkpoint of step {step} in {self._folder} is damaged: {_reason(error)}")
            else:
                return state, progress, warnings
        if warnings:
            raise UserError(
                f"no checkpoint in {self._folder} can be read. {warnings[0]} Restore one, or give another --run."
            )
        return None

    def _restore(self, step: int, like: TrainState) -> tuple[TrainState, Progress]:
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _saved(like))
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(target),  # pyright: ignore[reportCallIssue]
            progress=ocp.args.JsonRestore(),
            fingerprint=ocp.args.JsonRestore(),
        )
        restored = self._manager.restore(step, args=items)
        state, progress = like._replace(**restored["state"]), Progress(**restored["progress"])
        if _fingerprint(state, progress) != restored["fingerprint"]:
            raise ValueError("its content is not what was written")
        if int(state.step) != step:
            raise ValueError(f"it is of step {int(state.step)}")
        expected, found = (jax.tree.map(lambda leaf: leaf.dtype, tree) for tree in (like, state))
        assert found == expected, "a restored array has another type"
        return state, progress

    def put_aside(self, later_than: int) -> None:
        """Renames the folders of damaged checkpoints, so that their steps can be saved again. As `remove_leftovers`."""
        for step in self._manager.all_steps():
            if step > later_than:
                names = (self._folder / f"{step}.damaged{number or ''}" for number in itertools.count())
                (self._folder / str(step)).rename(next(name for name in names if not name.exists()))
        self._manager.reload()

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()


def _saved(state: TrainState) -> dict[str, Any]:
    return {name: part for name, part in state._asdict().items() if part is not None}


def _fingerprint(state: TrainState, progress: Progress) -> dict[str, Any]:
    text = json.dumps(progress._asdict(), sort_keys=True)
    leaves = np.asarray(fingerprint(_saved(state))).tolist()
    return {"leaves": leaves, "progress": hashlib.blake2b(text.encode()).hexdigest()[:16]}


def _not_of_storage(record: logging.LogRecord) -> bool:
    """The storage layer logs pages about an error that it raises, too: we say it in a sentence."""
    return not (record.levelno >= logging.WARNING and "orbax" in record.pathname)


def _reason(error: BaseException) -> str:
    """What an error says, short: the storage layer's text names every layer that it went through."""
    text = str(error).strip()
    found = re.search(r": ([^:\[\]]+) \[os_error_code=", text)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif found is not None:
        text = found[1]
    return (text.splitlines() or [type(error).__name__])[0][:300].rstrip(".") + "."
