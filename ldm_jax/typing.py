"""The axis legend, and the named array types that are used everywhere.

Every shape in this package is written with these letters, in annotations, docstrings and einsums:

    B  batch (sequences)          N  depth: observations, one per sublayer
    T  tokens of a sequence       D  model width
    G  groups of a depth memory   V  value width of a group, D / G
    K  key width                  R  width of the latent that a read or a write goes through
    H  query heads                J  key-value heads of grouped-query attention
    C  width of a head            F  hidden width of the MLP
    S  vocabulary (symbols)       E  streams of hyper-connections
    W  places that a decoding cache holds
"""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Float, Int

AnyArray = Array | np.ndarray

# One token, one group.
Scalar = Float[Array, ""]
Key = Float[Array, " K"]
Value = Float[Array, " V"]
Memory = Float[Array, "V K"]
InverseCovariance = Float[Array, "K K"]
State = tuple[Memory, InverseCovariance]

# What callers may pass: NumPy arrays and Python numbers, too.
ScalarLike = float | int | np.floating | Float[AnyArray, ""] | Int[AnyArray, ""]
KeyLike = Float[AnyArray, " K"] | Int[AnyArray, " K"]
MemoryLike = Float[AnyArray, "V K"]
InverseCovarianceLike = Float[AnyArray, "K K"]

# A batch of sequences.
Hidden = Float[Array, "B T D"]
Streams = Float[Array, "B T E D"]
Tokens = Int[Array, "B T"]
Logits = Float[Array, "B T S"]

DType = jax.typing.DTypeLike
Init = Callable[[int, int, ScalarLike], tuple[Array, Array]]
