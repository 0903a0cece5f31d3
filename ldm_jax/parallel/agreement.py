"""What the processes of a job tell each other: that they are the same, what has failed, that they shall stop.

All processes have to call these together. In a job of one process nothing is sent.
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
from ldm_jax.parallel.hosts import leads

TEXT_BYTES = 1024
"""Of a sentence that is sent to all; the rest is cut off."""


def code_fingerprint() -> str:
    """A hash of this package's source files."""
    folder = Path(__file__).parents[1]
    found = hashlib.blake2b()
    for file in sorted(folder.rglob("*.py")):
        found.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return found.hexdigest()


def require_same(texts: Mapping[str, str]) -> None:
    """Raises UserError on every process, unless each text, by name, is the same on all."""
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
        raise UserError(f"{', '.join(phrases)}: not as on process 0. All processes need the same.")


def first_failure(why: str | None) -> str | None:
    """The sentence of the first process that has one; None if all went well everywhere."""
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
    """Returns when all processes have come here."""
    first_failure(None)


def leader_does(task: Callable[[], None]) -> None:
    """Runs the task on process 0 while the others wait. Its UserError is raised on all."""
    why = None
    if leads():
        try:
            task()
        except UserError as error:
            if jax.process_count() == 1:
                raise
            why = str(error)
    if (failure := first_failure(why)) is not None:
        raise UserError(failure)


class StopVote:
    """Whether a process has been asked to stop: all have the same answer at the same step."""

    def __init__(self, mesh: Mesh):
        self._place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._before: Int[Array, ""] | None = None

    def cast(self, signal: int) -> int:
        """Gives this process's signal, 0 for none; returns the largest that was given the last time.

        That one has long been summed up: no device waits for the answer.
        """
        devices = self._place.mesh.size
        own = jax.make_array_from_callback((devices,), self._place, lambda index: np.full(1, signal, np.int32))
        before, self._before = self._before, self._largest(own)
        return 0 if before is None else int(before)
