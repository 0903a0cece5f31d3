"""One program over many devices: the mesh, and where the arrays of a training state and of a batch lie on it."""

from ldm_jax.parallel.mesh import check_mesh, make_mesh
from ldm_jax.parallel.placement import batch_sharding, parameter_axes, shardings

__all__ = ["batch_sharding", "check_mesh", "make_mesh", "parameter_axes", "shardings"]
