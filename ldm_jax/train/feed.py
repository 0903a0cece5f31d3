"""The batches of a run, on its devices."""

from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from ldm_jax.data import Batch, Data
from ldm_jax.parallel import RowsHere
from ldm_jax.sharding import batch_sharding


def feed(data: Data, start: int, batch_size: int, seed: int, mesh: Mesh | None) -> Iterator[Batch]:
    """Endless batches from window number `start` on; every process reads the rows that its own devices hold.

    Args:
        data: as loaded.
        start: windows consumed so far, by all processes.
        batch_size: windows of a batch, of all processes.
        seed: of the order.
        mesh: of all devices; None for one device.
    """
    place = None if mesh is None else batch_sharding(mesh)
    if place is None or jax.process_count() == 1:
        return (jax.device_put(batch, place) for batch in data.batches(start, batch_size, seed))
    here = RowsHere(place, batch_size)
    return (here.assemble(batch) for batch in data.batches(start, batch_size, seed, here.rows))
