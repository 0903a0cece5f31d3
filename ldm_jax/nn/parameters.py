"""A model split into its structure, without arrays, and its parameters, nested dictionaries of arrays.

`nnx.merge(model_graph(...), params)` is the model. Jitted functions take only the parameters, and checkpoints do not
depend on flax's types.
"""

import functools
from typing import Any

import jax
from flax import nnx, traverse_util

from ldm_jax.config import ModelConfig
from ldm_jax.mixers import MixerConfig
from ldm_jax.nn.transformer import Transformer
from ldm_jax.parameters import Declarations, declarations_of

Params = Any  # dict[str, Params | Float[Array, "..."]]


def _make(model: ModelConfig, mixer: MixerConfig, seed: int) -> Transformer:
    keys = jax.random.split(jax.random.key(seed), 3)
    return Transformer(model, mixer, rngs=nnx.Rngs(params=keys[0], blocks=keys[1], mixer=keys[2]))


@functools.cache
def model_declarations(model: ModelConfig, mixer: MixerConfig) -> Declarations:
    """The declarations of the model's parameters. No parameter is computed."""
    return declarations_of(nnx.eval_shape(lambda: _make(model, mixer, 0)))


@functools.cache
def model_graph(model: ModelConfig, mixer: MixerConfig) -> nnx.GraphDef[Transformer]:
    """The model's structure. No parameter is computed."""
    return nnx.split(nnx.eval_shape(lambda: _make(model, mixer, 0)), nnx.Param)[0]


def init_params(model: ModelConfig, mixer: MixerConfig, seed: int) -> Params:
    """The initial parameters, float32, from a seed. All but the mixer's are the same for every mixer."""
    return jax.jit(lambda: nnx.to_pure_dict(nnx.split(_make(model, mixer, seed), nnx.Param)[1]))()


def split_mixer(params: Params) -> tuple[Params, Params]:
    """The mixer's parameters, in all places, and those of the backbone; each as nested dictionaries."""
    flat = traverse_util.flatten_dict(params)
    mixer, backbone = ({path: leaf for path, leaf in flat.items() if ("mixer" in path) is of} for of in (True, False))
    return traverse_util.unflatten_dict(mixer), traverse_util.unflatten_dict(backbone)


def replace_params(params: Params, new: Params) -> Params:
    """The parameters, with those that `new` has replaced by its; both are nested dictionaries."""
    return traverse_util.unflatten_dict(traverse_util.flatten_dict(params) | traverse_util.flatten_dict(new))


def parts_of(params: Any) -> dict[str, list[Any]]:
    """The leaves by part: `embedding` (with an untied head), `blocks` (with the final norm), `mixer` (in all places).

    Args:
        params: the model's parameters, or another tree with their structure, as nested dictionaries.
    """
    parts: dict[str, list[Any]] = {"embedding": [], "blocks": [], "mixer": []}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = [part.key for part in path]
        part = "mixer" if "mixer" in names else "embedding" if names[0] in ("embed", "head") else "blocks"
        parts[part].append(leaf)
    return parts


def count_parameters(params: Any) -> dict[str, int]:
    """The number of parameters by part, as in `parts_of`."""
    return {part: sum(leaf.size for leaf in leaves) for part, leaves in parts_of(params).items()}
