"""Batches over several processes: which rows a process reads, and the global batch made of all rows."""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

Tree = TypeVar("Tree")


class LocalRows:
    """The rows of a batch that lie on this process's devices. Several processes may hold the same row."""

    def __init__(self, sharding: NamedSharding, batch_size: int):
        self._sharding, self._batch_size = sharding, batch_size
        indices = sharding.addressable_devices_indices_map((batch_size,))
        ranges = {device: range(batch_size)[index[0]] for device, index in indices.items() if index is not None}
        self.rows = sorted({row for rows in ranges.values() for row in rows})
        """Indices into the batch, in ascending order, each once."""
        # The rows of a device are contiguous in the batch, and so in `rows`.
        first = {device: self.rows.index(rows.start) for device, rows in ranges.items()}
        self._parts = {device: slice(first[device], first[device] + len(rows)) for device, rows in ranges.items()}

    def assemble(self, local: Tree) -> Tree:
        """The global batch, from a tree of arrays that hold this process's rows in the order of `rows`."""

        def assemble_array(x: np.ndarray[Any, Any]) -> jax.Array:
            parts = [jax.device_put(x[part], device) for device, part in self._parts.items()]
            return jax.make_array_from_single_device_arrays((self._batch_size, *x.shape[1:]), self._sharding, parts)

        return jax.tree.map(assemble_array, local)
