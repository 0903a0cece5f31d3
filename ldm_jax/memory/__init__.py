"""The mathematics of depth memories: pure JAX functions of arrays, for one token and one group.

Nothing here imports flax or depends on a mesh, a file or a training step. Use `jax.vmap` for groups and batch.
"""

from ldm_jax.memory.additive import additive_write
from ldm_jax.memory.delta import delta_write
from ldm_jax.memory.depth_loop import depth_memory_loop
from ldm_jax.memory.depth_scan import Backward, depth_map, depth_scan
from ldm_jax.memory.dual import dual_read, dual_weights
from ldm_jax.memory.fused import undo_write, write_read
from ldm_jax.memory.observation import Observation
from ldm_jax.memory.regression import regression_objective, solve_depth_regression
from ldm_jax.memory.rls import Correction, init_state, rls_apply, rls_correction, rls_read, rls_undo, rls_write
from ldm_jax.memory.sqrt_rls import (
    sqrt_init_state,
    sqrt_rls_apply,
    sqrt_rls_correction,
    sqrt_rls_undo,
    sqrt_rls_write,
)
from ldm_jax.memory.write import Covariance, Residual

__all__ = [
    "Backward",
    "Correction",
    "Covariance",
    "Observation",
    "Residual",
    "additive_write",
    "delta_write",
    "depth_map",
    "depth_memory_loop",
    "depth_scan",
    "dual_read",
    "dual_weights",
    "init_state",
    "regression_objective",
    "rls_apply",
    "rls_correction",
    "rls_read",
    "rls_undo",
    "rls_write",
    "solve_depth_regression",
    "sqrt_init_state",
    "sqrt_rls_apply",
    "sqrt_rls_correction",
    "sqrt_rls_undo",
    "sqrt_rls_write",
    "undo_write",
    "write_read",
]
