"""The axis letters, the symbols, and the named array types that the package uses.

Shapes are written with these letters, in annotations, docstrings and einsums:

    B  batch (sequences)          N  depth (observations, one per sublayer)
    T  tokens of a sequence       D  model width
    G  groups of a depth memory   V  value width of a group, D / G
    K  key width                  R  width of the latents that keys, queries and gates are computed from
    H  query heads                J  key-value heads of grouped-query attention
    C  width of a head            F  hidden width of the MLP
    S  vocabulary size            E  streams of hyper-connections
    W  slots of a decoding cache

Formulas use these symbols. `'` is a transpose, and is used for nothing else.

    k  key                        lambda  forgetting, in (0, 1]
    v  value                      beta    importance, >= 0
    q  query                      alpha   inverse of the ridge
    M  memory                     e       error, v - M k
    P  inverse covariance         u       P k
    S  factor of P, P = S S'      s       innovation, lambda + beta k'u
                                  g       gain, beta / s
"""

from collections.abc import Callable
from typing import Any

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

# Types of arguments: NumPy arrays and Python numbers are accepted, too.
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
Init = Callable[[int, int, ScalarLike], tuple[Array, Any]]
