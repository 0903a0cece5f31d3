"""Agreement among the processes of a job: same inputs, first failure, common stop.

All processes must call these functions together. In a job of one process they do not communicate.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from ldm_jax.errors import UserError
from ldm_jax.parallel.hosts import is_leader

TEXT_BYTES = 1024
"""Longest sentence that is sent to all processes; the rest is cut off."""


def code_fingerprint() -> str:
    """A hash of this package's source files."""
    package = Path(__file__).parents[1]
    digest = hashlib.blake2b()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.hexdigest()


def require_same(texts: Mapping[str, str]) -> None:
    """Compares texts, given by name, among the processes. Raises UserError on every process if one differs."""
    if jax.process_count() == 1:
        return
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts.values()]
    every = multihost_utils.process_allgather(np.frombuffer(b"".join(digests), np.uint32).reshape(len(texts), 2))
    differs = np.any(every != every[:1], axis=-1)
    phrases = [
        f"{name} of process{'es' if len(others) > 1 else ''} {' and '.join(map(str, others))}"
        for name, row in zip(texts, differs.T, strict=True)
        if (others := np.flatnonzero(row).tolist())
    ]
    if phrases:
        raise UserError(f"{', '.join(phrases)}: not the same as on process 0. All processes need the same.")


def first_failure(why: str | None) -> str | None:
    """The sentence of the first process that has one; None if no process has."""
    if jax.process_count() == 1:
        return why
    text = np.zeros(TEXT_BYTES, np.uint8)
    encoded = (why or "").encode()[:TEXT_BYTES]
    text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    for row in multihost_utils.process_allgather(text):
        if row[0]:
            return bytes(row).rstrip(b"\0").decode(errors="ignore")
    return None


def wait_for_all() -> None:
    """Waits until all processes have called this."""
    first_failure(None)


def on_leader(task: Callable[[], None]) -> None:
    """Runs the task on process 0 while the others wait. If it raises UserError, all processes do."""
    why = None
    if is_leader():
        try:
            task()
        except UserError as error:
            if jax.process_count() == 1:
                raise
            why = str(error)
    if (failure := first_failure(why)) is not None:
        raise UserError(failure)


class StopVote:
    """Whether any process has received a signal to stop; the answer at each step is the same on all."""

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._previous: Int[Array, ""] | None = None

    def cast(self, signal: int) -> int:
        """Sends this process's signal, 0 for none, and returns the largest signal of the previous call.

        The previous maximum is already computed, so no device waits for the result.
        """
        devices = self._sharding.mesh.size
        own = jax.make_array_from_callback((devices,), self._sharding, lambda index: np.full(1, signal, np.int32))
        previous, self._previous = self._previous, self._largest(own)
        return 0 if previous is None else int(previous)
