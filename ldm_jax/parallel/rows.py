"""Which rows of a batch lie on the devices of this process, and the batch made of every process's rows."""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

Tree = TypeVar("Tree")


class RowsHere:
    """The rows of a batch that this process reads, each once; several processes may read the same.

    In a job of one process these are all.
    """

    def __init__(self, place: NamedSharding, batch_size: int):
        self._place, self._batch_size = place, batch_size
        indices = place.addressable_devices_indices_map((batch_size,))
        ranges = {device: range(batch_size)[index[0]] for device, index in indices.items() if index is not None}
        self.rows = sorted({row for rows in ranges.values() for row in rows})
        """In the order of the batch."""
        # A device's rows lie next to each other, here as in the batch.
        first = {device: self.rows.index(rows.start) for device, rows in ranges.items()}
        self._parts = {device: slice(first[device], first[device] + len(rows)) for device, rows in ranges.items()}

    def assemble(self, local: Tree) -> Tree:
        """The whole batch, of a tree of arrays that have this process's rows, in their order."""

        def one(x: np.ndarray[Any, Any]) -> jax.Array:
            parts = [jax.device_put(x[part], device) for device, part in self._parts.items()]
            return jax.make_array_from_single_device_arrays((self._batch_size, *x.shape[1:]), self._place, parts)

        return jax.tree.map(one, local)
