"""Checkpoints of a run: saved asynchronously and atomically, and verified when they are restored."""

import contextlib
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from ldm_jax.config import Config
from ldm_jax.config.toml import parse_config
from ldm_jax.errors import UserError
from ldm_jax.files import acquire_lock, writing
from ldm_jax.nn import Params, replace_params
from ldm_jax.parallel import first_failure, is_leader, wait_for_all
from ldm_jax.runs.fingerprint import fingerprint
from ldm_jax.runs.state import TrainState
from ldm_jax.runs.storage import STORE_FILE, in_bucket, silence_background_errors, storage_error, storage_path

T = TypeVar("T")

SPARE_BYTES = 2_000_000
"""Disk space that a save needs beside its arrays: index, metadata, metrics."""
TIMEOUT_SECONDS = 300
"""How long one process waits for another before a save or a restore fails."""


class Progress(NamedTuple):
    """What a checkpoint holds beside the training state; it is stored as JSON."""

    windows: int
    """Training windows consumed. This is the position in the data, for any batch size and number of hosts."""
    seconds: float
    """Training time of all starts together."""
    corpus: str
    """Fingerprint of the corpora; empty for an imported model that has not been trained."""
    config: str
    """The whole config, as TOML."""
    tokenizer: dict[str, str]
    """Content of the tokenizer's files, by file name; empty for a model that was imported without one."""


class SavedParams(NamedTuple):
    """The parameters in a checkpoint, without the rest of its training state."""

    step: int
    params: Params
    averaged: bool
    """Whether they are the moving average of the parameters, as far as these were trained."""
    progress: Progress


class Checkpoints:
    """The checkpoints in a directory: the latest `keep`, and all whose step is a multiple of `keep_every`.

    Saves run in the background. Failures are returned as sentences rather than raised, so that training can continue.
    With several processes, each saves its own shards; all must make the same calls, and all return the same failure.
    """

    def __init__(self, directory: epath.PathLike, keep: int, keep_every: int | None = None):
        self.directory = storage_path(directory)
        """Where the checkpoints are; this may be a bucket."""
        several = jax.process_count() > 1
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every,
            enable_async_checkpointing=True,
            create=False,
            async_options=ocp.AsyncOptions(timeout_secs=TIMEOUT_SECONDS) if several else None,
            # With the active processes named, barriers do not use the devices and have a timeout.
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=set(range(jax.process_count())) if several else None
            ),
        )
        silence_background_errors()
        try:
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=self._options,
                # Float32 is hardly compressible, and compression needs as much memory as the arrays.
                item_handlers={
                    "state": ocp.PyTreeCheckpointHandler(
                        use_compression=False, multiprocessing_options=self._options.multiprocessing_options
                    ),
                    "progress": ocp.JsonCheckpointHandler(),
                    "fingerprint": ocp.JsonCheckpointHandler(),
                },
            )
        except Exception as error:  # storage drivers raise types of their own
            raise UserError(f"{self.directory} cannot be read: {storage_error(error)}") from error
        self._saving: int | None = None
        self._lock: TextIO | None = None

    def lock(self) -> None:
        """Locks the directory (a bucket cannot be) until `close`. Raises UserError if it is in use, or not writable."""
        if not in_bucket(self.directory):
            with writing(self.directory):
                self._lock = acquire_lock(Path(self.directory / STORE_FILE), "training in", "--run")

    def last_config(self) -> tuple[Config, str] | None:
        """The config and the corpus's fingerprint in the newest checkpoint where they can be read; None: in none."""
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                progress, digest = (
                    json.loads((self.directory / str(step) / item / "metadata").read_text())
                    for item in ("progress", "fingerprint")
                )
                if _digest(progress) == digest["progress"]:
                    config = parse_config(progress["config"], f"the config of step {step} in {self.directory}")
                    return config, progress["corpus"]
            except (OSError, ValueError, TypeError, KeyError, UserError):
                continue
        return None

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, progress: Progress) -> str | None:
        """Starts to save a checkpoint; `wait` must have been called for the one before. `state` may be donated at once.

        Returns:
            None, or why the checkpoint cannot be saved, as a sentence. Earlier checkpoints are untouched.
        """
        if (why := first_failure(self._lack_of_space(state))) is not None:
            return self._failed(step, why)
        why = None
        try:
            items = ocp.args.Composite(
                state=ocp.args.PyTreeSave(_saved(state)),  # pyright: ignore[reportCallIssue]
                progress=ocp.args.JsonSave(progress._asdict()),  # pyright: ignore[reportCallIssue]
                fingerprint=ocp.args.JsonSave(_digests(_saved(state), progress)),  # pyright: ignore[reportCallIssue]
            )
            if not self._manager.save(step, args=items):
                raise OSError(f"the directory already has a checkpoint of step {self.latest_step()}")
            self._saving = step
        except Exception as error:  # Orbax and its storage drivers raise types of their own
            why = _reason(error)
        return self._outcome(step, why)

    def wait(self) -> str | None:
        """Waits until the last save is complete. Returns None, or why it failed, as a sentence."""
        step, self._saving = self._saving, None
        if step is None:
            return None
        why = None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            why = _reason(error)
        return self._outcome(step, why)

    def remove_leftovers(self) -> None:
        """Removes what interrupted saves have left. Only for the job that trains in the directory.

        In a directory, a complete checkpoint is renamed to its step; in a bucket, a last file marks it as complete.
        """
        if is_leader():
            with contextlib.suppress(Exception):  # of storage drivers, too; the next start tries again
                complete = {str(step) for step in ocp.utils.checkpoint_steps(self.directory)}
                for entry in self.directory.iterdir():
                    unmarked = in_bucket(entry) and entry.name.isdecimal() and entry.name not in complete
                    if unmarked or entry.name.endswith(".orbax-checkpoint-tmp"):
                        entry.rmtree()
        wait_for_all()

    def _outcome(self, step: int, why: str | None) -> str | None:
        why = _reason_of_all(why)
        return None if why is None else self._failed(step, why)

    def _failed(self, step: int, why: str) -> str:
        self._saving = None
        self.remove_leftovers()
        with contextlib.suppress(Exception):  # of storage that cannot even be read
            self._manager.reload()  # else it can list the failed checkpoint
        latest = self.latest_step()
        return f"the checkpoint of step {step} could not be written to {self.directory}: {why} " + (
            "There is no earlier one." if latest is None else f"The checkpoint of step {latest} is kept."
        )

    def _lack_of_space(self, state: TrainState) -> str | None:
        """Checked before a save, because a save that fails halfway costs its whole time."""
        if in_bucket(self.directory):
            return None
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + SPARE_BYTES
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            return _reason(error)
        if free >= needed:
            return None
        return f"it needs {needed / 1e6:,.1f} MB, but the disk has only {free / 1e6:,.1f} MB left."

    def restore_latest(self, like: TrainState) -> tuple[TrainState, Progress, list[str]] | None:
        """Restores the newest checkpoint that is intact, with the shapes, types and shardings of the state `like`.

        A checkpoint that cannot be read, or whose content does not match its fingerprint, is skipped. Nothing on disk
        changes, because another process may be training there.

        Returns:
            State, progress, and a warning for each skipped checkpoint; None if there is no checkpoint at all.

        Raises:
            UserError: there are checkpoints, but none is intact or has such arrays; or one was saved in 64-bit mode
                by an earlier version, and the mode is off.
        """
        found = self._first_intact(lambda step: self._restore(step, like))
        return None if found is None else (*found[0], found[1])

    def restore_params(self, like: Params, step: int | None = None) -> tuple[SavedParams, list[str]] | None:
        """Restores the parameters to evaluate, from the checkpoint of a step or the newest one that is intact.

        Only they are read, verified by their part of the fingerprint. Otherwise as `restore_latest`.

        Args:
            like: their shapes, types and shardings, as `jax.ShapeDtypeStruct`s.
            step: None for the newest intact checkpoint.

        Raises:
            UserError: as `restore_latest`; there is no checkpoint of this step, or it is corrupt.
        """
        return self._first_intact(lambda step: self._restore_params(step, like), step)

    def _first_intact(self, restore: Callable[[int], T], only: int | None = None) -> tuple[T, list[str]] | None:
        warnings, steps = list[str](), sorted(self._manager.all_steps())
        if only is not None and only not in steps:
            kept = ", ".join(map(str, steps)) or "none"
            raise UserError(f"{self.directory} has no checkpoint of step {only}: the steps kept are {kept}.")
        for step in reversed(steps if only is None else [only]):
            restored, why = None, None
            try:
                restored = restore(step)
            except UserError:
                raise
            except Exception as error:
                removed = not (self.directory / str(step)).exists()
                if removed and jax.process_count() == 1:  # by another process, which trains and keeps only the latest
                    self._manager.reload()
                    return self._first_intact(restore, only)
                why = _reason(error)
            if (why := _reason_of_all(why)) is not None:
                warnings.append(f"the checkpoint of step {step} in {self.directory} is corrupt: {why}")
            elif restored is not None:
                return restored, warnings
        if warnings:
            raise UserError(
                f"no checkpoint in {self.directory} can be read: {warnings[0]} Restore one from a backup, or give "
                "another --run."
            )
        return None

    def _restore(self, step: int, like: TrainState) -> tuple[TrainState, Progress]:
        target, saved = jax.tree.map(ocp.utils.to_shape_dtype_struct, _saved(like)), self._saved_arrays(step)
        if not any(name.startswith("optimizer.") for name in saved):  # an imported model has only step and parameters
            target = {name: target[name] for name in ("step", "params")}
        target = self._with_saved_types(step, saved, target)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(  # pyright: ignore[reportCallIssue]
                target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
            ),
            progress=ocp.args.JsonRestore(),
            fingerprint=ocp.args.JsonRestore(),
        )
        restored = self._manager.restore(step, args=items)
        state, progress = like._replace(**restored["state"]), Progress(**restored["progress"])
        if _digests(restored["state"], progress) != restored["fingerprint"]:
            raise ValueError("its content does not match its fingerprint")
        if int(state.step) != step:
            raise ValueError(f"it holds the state of step {int(state.step)}")
        if state.average is like.average and like.average is not None:  # an imported model has none
            state = state._replace(average=jax.tree.map(jnp.copy, state.params))
        return jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), state, like), progress

    def _restore_params(self, step: int, like: Params) -> SavedParams:
        saved = self._saved_arrays(step)
        parts: dict[str, Any] = {"average": {}, "params": {}}
        for path, leaf in traverse_util.flatten_dict(like).items():
            part = "average" if ".".join(("average", *path)) in saved else "params"
            parts[part][path] = leaf
        place = jax.tree.leaves(like)[0].sharding
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, PartitionSpec())
        target: dict[str, Any] = {part: traverse_util.unflatten_dict(each) for part, each in parts.items() if each}
        target["step"] = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
        target = self._with_saved_types(step, {name: saved[name] for name in _by_name(target) if name in saved}, target)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(  # pyright: ignore[reportCallIssue]
                target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=True,
            ),
            progress=ocp.args.JsonRestore(),
            fingerprint=ocp.args.JsonRestore(),
        )
        restored = self._manager.restore(step, args=items)
        state, progress = restored["state"], Progress(**restored["progress"])
        # A fingerprint is in the order of the flattened tree: for nested dictionaries, that of the parts of the names.
        order = sorted(saved, key=lambda name: name.split("."))
        numbers = dict(zip(order, restored["fingerprint"]["leaves"], strict=True))
        if np.asarray(fingerprint(state)).tolist() != [numbers[name] for name in _by_name(target)]:
            raise ValueError("its content does not match its fingerprint")
        if _digest(progress._asdict()) != restored["fingerprint"]["progress"]:
            raise ValueError("its progress does not match its fingerprint")
        if int(state["step"]) != step:
            raise ValueError(f"it holds the state of step {int(state['step'])}")
        average = state.get("average", {})
        params = replace_params(state.get("params", {}), average)
        params = jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), params, like)
        return SavedParams(step, params, bool(average), progress)

    def _saved_arrays(self, step: int) -> dict[str, Any]:
        """The types and shapes of a checkpoint's arrays, by name."""
        metadata = ocp.StandardCheckpointHandler().metadata(self.directory / str(step) / "state")
        return {array.name: array for array in jax.tree.leaves(metadata.tree)}

    def _with_saved_types(self, step: int, saved: Mapping[str, Any], target: dict[str, Any]) -> dict[str, Any]:
        """The arrays to restore, with the types in which they were saved: the fingerprint is of those.

        Raises:
            ValueError: the checkpoint has other arrays.
            UserError: it was saved in JAX's 64-bit mode by an earlier version, and the mode is off.
        """
        wanted = _by_name(target)
        for name in dict.fromkeys([*wanted, *saved]):
            found, expected = (_type(tree.get(name)) for tree in (saved, wanted))
            if found.replace("float64", "float32") != expected:
                if name.startswith("optimizer."):
                    raise UserError(
                        f"the checkpoint of step {step} in {self.directory} is intact, but its optimiser has another "
                        f"structure, because an earlier version saved it: {name} is {found} in it, but must be "
                        f"{expected}. Use the version that saved it, or give another --run."
                    )
                raise ValueError(f"{name} is {found} in it, but must be {expected}")
            if "float64" in found and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
                raise UserError(
                    f"the checkpoint of step {step} in {self.directory} was saved in JAX's 64-bit mode ({name} is "
                    f"{found}): set JAX_ENABLE_X64=1 and train some steps; what is then saved can be read in any mode."
                )
        typed = [each.update(dtype=saved[name].dtype) for name, each in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(target), typed)

    def rename_corrupt(self, later_than: int) -> None:
        """Renames the directories of skipped checkpoints, so that their steps can be saved again.

        Only for the job that trains in the directory.
        """
        for step in self._manager.all_steps() if is_leader() else ():
            if step > later_than:
                names = (self.directory / f"{step}.corrupt{number or ''}" for number in itertools.count())
                (self.directory / str(step)).rename(next(name for name in names if not name.exists()))
        wait_for_all()
        self._manager.reload()

    def close(self) -> None:
        """Stops the background threads, and releases the lock."""
        with contextlib.suppress(Exception):  # of a save that no `wait` has reported, because training has failed
            self._manager.wait_until_finished()
        with contextlib.suppress(Exception):
            self._manager.close()
        if self._lock is not None:
            self._lock.close()


def holds_checkpoints(directory: epath.Path) -> bool:
    """Whether a directory or bucket has checkpoints, intact or not. Raises UserError if it cannot be read."""
    try:
        return any(directory.glob("*/progress"))
    except Exception as error:  # storage drivers raise types of their own
        raise UserError(f"{directory} cannot be read: {storage_error(error)}") from error


def _digests(saved: dict[str, Any], progress: Progress) -> dict[str, Any]:
    return {"leaves": fingerprint(saved).tolist(), "progress": _digest(progress._asdict())}


def _digest(progress: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(progress, sort_keys=True).encode()).hexdigest()[:16]


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves by name, such as `params.embed.embedding`, in the tree's order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _type(array: Any) -> str:
    """An array's type and shape, such as `float32[2,16]`."""
    return "absent" if array is None else f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _saved(state: TrainState) -> dict[str, Any]:
    return {name: part for name, part in state._asdict().items() if part is not None}


_TIMED_OUT = f"it timed out after {TIMEOUT_SECONDS} seconds of waiting for another process"


def _reason(error: BaseException) -> str:
    """Why a save or a restore failed, as a sentence."""
    if jax.process_count() > 1 and re.search("Barrier timed out|Timed out while waiting", str(error)):
        # The timeout can be the consequence of an error on this process, which then says more.
        return f"{_TIMED_OUT}." if error.__context__ is None else _reason(error.__context__)
    return storage_error(error)


def _reason_of_all(why: str | None) -> str | None:
    """The reason of the first process that has one. A timeout counts last, because another process has caused it."""
    if jax.process_count() == 1:
        return why
    why = why and f"process {jax.process_index()}: {why}"
    timed_out = why is not None and _TIMED_OUT in why
    return first_failure(None if timed_out else why) or first_failure(why)
