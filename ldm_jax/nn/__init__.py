"""The transformer: thin flax modules on top of JAX functions."""

from ldm_jax.nn.loss import target_weights
from ldm_jax.nn.parameters import (
    Params,
    count_parameters,
    init_params,
    model_declarations,
    model_graph,
    parts_of,
    replace_params,
    split_mixer,
)
from ldm_jax.nn.transformer import Transformer

__all__ = [
    "Params",
    "Transformer",
    "count_parameters",
    "init_params",
    "model_declarations",
    "model_graph",
    "parts_of",
    "replace_params",
    "split_mixer",
    "target_weights",
]
