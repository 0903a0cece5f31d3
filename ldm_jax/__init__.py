"""Linear Depth Memory (LDM) in JAX: a memory for each token that is carried across a transformer's layers."""

from importlib.metadata import version as _version

from ldm_jax.memory import (
    Backward,
    Correction,
    Observation,
    additive_write,
    delta_write,
    depth_memory_loop,
    depth_scan,
    dual_read,
    dual_weights,
    init_state,
    regression_objective,
    rls_apply,
    rls_correction,
    rls_read,
    rls_undo,
    rls_write,
    solve_depth_regression,
    sqrt_init_state,
    sqrt_rls_apply,
    sqrt_rls_correction,
    sqrt_rls_undo,
    sqrt_rls_write,
)

__version__ = _version("ldm_jax")

__all__ = [
    "Backward",
    "Correction",
    "Observation",
    "__version__",
    "additive_write",
    "delta_write",
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
]
