"""Checkpoints of a run: written beside the training, whole or not at all, and checked when they are read."""

import contextlib
import hashlib
import itertools
import json
import logging
import shutil
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from ldm_jax.errors import UserError
from ldm_jax.parallel import first_failure, leader_does, leads, wait_for_all
from ldm_jax.train.fingerprint import fingerprint
from ldm_jax.train.step import TrainState
from ldm_jax.train.storage_errors import LONGEST_WAIT, not_of_storage, reason, reason_of_all

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
    need not end for it. Of several processes each writes its own arrays, and all have to make the same calls; what goes
    wrong in one is returned in all.
    """

    def __init__(self, folder: epath.PathLike, keep: int, keep_every: int | None = None):
        self._bucket = "://" in str(folder)
        self._folder = epath.Path(folder) if self._bucket else epath.Path(folder).absolute()
        several = jax.process_count() > 1
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every,
            enable_async_checkpointing=True,
            create=not several,
            async_options=ocp.AsyncOptions(timeout_secs=LONGEST_WAIT) if several else None,
            # Named, processes wait for each other without their devices, and not for ever.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=set(range(jax.process_count())) if several else None
            ),
        )
        if several:
            leader_does(lambda: _make_folder(self._folder))
        logging.getLogger("absl").addFilter(not_of_storage)
        try:
            self._manager = ocp.CheckpointManager(self._folder, options=self._options)
        except ImportError as error:
            raise UserError(
                f"{folder} cannot be reached: {error} (pip install gcsfs for gs://, s3fs for s3://)."
            ) from error
        self._saving: int | None = None

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint that was written to its end, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, progress: Progress) -> str | None:
        """Starts to write a checkpoint, after a `wait` for the one before; the state may change at once.

        Returns why it cannot be written, as a sentence, or None. What was written earlier is untouched.
        """
        if (why := first_failure(self._lack_of_space(state))) is not None:
            return self._failed(step, why)
        why = None
        try:
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(_saved(state)),  # pyright: ignore[reportCallIssue]
                progress=ocp.args.JsonSave(progress._asdict()),  # pyright: ignore[reportCallIssue]
                fingerprint=ocp.args.JsonSave(_fingerprint(state, progress)),  # pyright: ignore[reportCallIssue]
            )
            if not self._manager.save(step, args=items):
                raise OSError(f"the folder has a checkpoint of step {self.latest_step()} already")
            self._saving = step
        except Exception as error:  # the storage layer raises types of its own
            why = reason(error)
        return self._outcome(step, why)

    def wait(self) -> str | None:
        """Waits until the last checkpoint is written. Returns why it could not be, or None."""
        step, self._saving = self._saving, None
        if step is None:
            return None
        why = None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            why = reason(error)
        return self._outcome(step, why)

    def remove_leftovers(self) -> None:
        """Removes what a save that was broken off has left. Only for the one process that trains."""
        if leads():
            for leftover in self._folder.glob("*.orbax-checkpoint-tmp"):
                with contextlib.suppress(OSError):
                    leftover.rmtree()
        wait_for_all()

    def _outcome(self, step: int, why: str | None) -> str | None:
        why = reason_of_all(why)
        return None if why is None else self._failed(step, why)

    def _failed(self, step: int, why: str) -> str:
        self._saving = None
        self.remove_leftovers()
        self._manager.reload()  # it counts the failed one among those that there are
        kept = self.latest_step()
        return f"the checkpoint of step {step} could not be written to {self._folder}: {why} " + (
            "There is no earlier one." if kept is None else f"The one of step {kept} is kept."
        )

    def _lack_of_space(self, state: TrainState) -> str | None:
        if self._bucket:
            return None
        # Asked beforehand: a write that fails halfway has cost its time.
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + SPARE_BYTES
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            return reason(error)
        return (
            f"it needs {needed / 1e6:,.1f} MB, and the disk has {free / 1e6:,.1f} MB left." if free < needed else None
        )

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
            restored, why = None, None
            try:
                restored = self._restore(step, like)
            except Exception as error:
                gone = not (self._folder / str(step)).exists()
                if gone and jax.process_count() == 1:  # another process trains, and keeps the latest only
                    self._manager.reload()
                    return self.restore_latest(like)
                why = reason(error)
            if (why := reason_of_all(why)) is not None:
                warnings.append(f"the checkpoint of step {step} in {self._folder} is damaged: {why}")
            elif restored is not None:
                return *restored, warnings
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
        for step in self._manager.all_steps() if leads() else ():
            if step > later_than:
                names = (self._folder / f"{step}.damaged{number or ''}" for number in itertools.count())
                (self._folder / str(step)).rename(next(name for name in names if not name.exists()))
        wait_for_all()
        self._manager.reload()

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()


def _make_folder(folder: epath.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from error


def _saved(state: TrainState) -> dict[str, Any]:
    return {name: part for name, part in state._asdict().items() if part is not None}


def _fingerprint(state: TrainState, progress: Progress) -> dict[str, Any]:
    text = json.dumps(progress._asdict(), sort_keys=True)
    leaves = np.asarray(fingerprint(_saved(state))).tolist()
    return {"leaves": leaves, "progress": hashlib.blake2b(text.encode()).hexdigest()[:16]}
