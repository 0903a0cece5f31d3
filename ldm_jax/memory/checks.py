"""Checks of arguments.

Shapes and types are known during tracing, so they are always checked. Values are checked only if they are concrete:
traced values are not checked, and nothing is added to the compiled program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ldm_jax.typing import DType


def concrete(number: Any, dtype: DType) -> np.ndarray | None:
    """The values of an array, cast to the state's type; None if they are traced or not addressable by this process."""
    if isinstance(number, jax.core.Tracer):
        return None
    if isinstance(number, jax.Array) and not number.is_fully_addressable:
        return None
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(number).astype(dtype)


def check_shape(name: str, array: Any, shape: tuple[int, ...], letters: str) -> None:
    """Raises ValueError unless `array` has this shape. `letters` names its axes as in `ldm_jax.typing`."""
    if np.shape(array) != shape:
        raise ValueError(
            f"{name} has shape {np.shape(array)}, but it must be [{letters}] = {shape}. "
            "The function takes one token and one group: use jax.vmap for groups and batch."
        )


def precision(dtype: DType) -> float:
    """How many times smaller a rounding of this type is than one of float32; 1 for types less precise than that."""
    return max(1.0, float(jnp.finfo(jnp.float32).eps) / float(jnp.finfo(dtype).eps))


def check_alpha(alpha: Any, dtype: DType, largest: float = np.inf) -> None:
    """Raises ValueError if alpha is concrete and not positive, finite and at most `largest` in this type."""
    check_shape("alpha", alpha, (), "")
    allowed = "must be positive and " + ("finite" if largest == np.inf else f"at most {largest:.4g}")
    _check(alpha, dtype, lambda x: (x > 0) & np.isfinite(x) & (x <= largest), "alpha", allowed)


def check_forgetting(forgetting: Any, dtype: DType) -> None:
    """Raises ValueError if forgetting is concrete and outside (0, 1] in this type."""
    tiny = jnp.finfo(dtype).tiny  # hardware that flushes subnormal numbers would make smaller ones 0
    _check(forgetting, dtype, lambda x: (x >= tiny) & (x <= 1), "forgetting", "must lie in (0, 1]; 1 forgets nothing")


def check_importance(importance: Any, dtype: DType) -> None:
    """Raises ValueError if importance is concrete and negative or not finite in this type."""
    allowed = "must be finite and not negative; with 0 the observation is not written"
    _check(importance, dtype, lambda x: (x >= 0) & np.isfinite(x), "importance", allowed)


def check_finite(name: str, array: Any, dtype: DType) -> None:
    """Raises ValueError if the array is concrete and has an element that is not finite in this type."""
    _check(array, dtype, np.isfinite, f"an element of {name}", "must be finite")


def check_importance_for(variance: Any, importance: Any, dtype: DType, power: int = 1) -> None:
    """Raises ValueError if importance is concrete and leaves no digit of `variance = k'P k / lambda`.

    A write divides the variance by `1 + beta k'P k / lambda`, and rounds it to `eps` of its value before the write. The
    factor of the square root is divided by the root: its `power` is 2.
    """
    variances, importances = concrete(variance, dtype), concrete(importance, dtype)
    if variances is None or importances is None:
        return
    with np.errstate(divide="ignore", over="ignore"):
        largest = float(jnp.finfo(dtype).eps) ** -power / np.float64(variances)
    if not importances <= largest:
        raise ValueError(
            f"importance is {importance}, but for this key and inverse covariance it must be at most {largest:.3g} in "
            f"{jnp.dtype(dtype)}: a larger one would leave no correct digit of the inverse covariance."
        )


def check_result(state: Any) -> None:
    """Raises ValueError if a state is concrete and not finite."""
    for array in jax.tree.leaves(state):
        values = concrete(array, array.dtype)
        if values is not None and not np.all(np.isfinite(values)):
            raise ValueError(
                f"the state after all observations is not finite in {array.dtype}: the inverse covariance is at most "
                "alpha over the product of forgetting, and reaches that where no key is written. Use more forgetting "
                "near 1, or fewer observations."
            )


def _check(number: Any, dtype: DType, admits: Callable[[np.ndarray], np.ndarray], name: str, allowed: str) -> None:
    values = concrete(number, dtype)
    if values is not None and not np.all(admits(values)):
        worst = np.asarray(number)[~admits(values)].flat[0]
        raise ValueError(f"{name} is {worst}, but in {jnp.dtype(dtype)} it {allowed}.")


def check_state(memory: Any, inverse_covariance: Any) -> None:
    """Raises ValueError or TypeError unless the state has shapes [V, K] and [K, K] and one floating type."""
    if np.ndim(memory) != 2:
        raise ValueError(
            f"the memory has shape {np.shape(memory)}, but it must be [V, K]. "
            "The function takes one token and one group: use jax.vmap for groups and batch."
        )
    key_dim = np.shape(memory)[1]
    check_shape("the inverse covariance", inverse_covariance, (key_dim, key_dim), "K, K")
    types = jnp.result_type(memory), jnp.result_type(inverse_covariance)
    if types[0] != types[1] or not jnp.issubdtype(types[0], jnp.floating):
        raise TypeError(
            f"the memory is {types[0]} and the inverse covariance {types[1]}, but both must have the same floating "
            "type: the dtype passed to init_state."
        )


def checked_state_type(dtype: DType) -> jnp.dtype:
    """The state's type. Raises TypeError if it is not floating, or if it is float64 without JAX's 64-bit mode."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype is {jnp.dtype(dtype)}, but it must be a floating type, such as float32.")
    if jnp.dtype(dtype) == jnp.float64 and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise TypeError('dtype is float64, which needs JAX\'s 64-bit mode: jax.config.update("jax_enable_x64", True).')
    return jnp.dtype(dtype)


def check_dims(value_dim: int, key_dim: int) -> None:
    """Raises ValueError unless both widths are at least 1."""
    for name, dim in (("value_dim", value_dim), ("key_dim", key_dim)):
        if dim < 1:
            raise ValueError(f"{name} is {dim}, but it must be at least 1.")
