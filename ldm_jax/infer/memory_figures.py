"""What a depth memory does at every sublayer, for the log of a run."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ldm_jax.config import Config
from ldm_jax.memory.depth_scan import depth_map
from ldm_jax.mixers import Form, MixerState, Write
from ldm_jax.mixers.ldm import LDMLayer
from ldm_jax.nn import model_graph
from ldm_jax.nn.attention import Documents, make_documents
from ldm_jax.nn.block import Block
from ldm_jax.typing import Tokens


class MemoryFigures(NamedTuple):
    """Of every sublayer and group; means over tokens."""

    forgetting: Float[Array, "N G"]
    gain: Float[Array, "N G"]
    gate: Float[Array, "N G"]
    importance: Float[Array, "N G"]
    log10_condition: Float[Array, "N G"]
    """Of the inverse covariance that the sublayer reads with."""


def make_memory_figures(config: Config) -> Callable[..., MemoryFigures]:
    """A compiled function `(params, tokens, segments=None)` for the mixer ldm. The numbers are the same for each form.

    Segments are the numbers of the tokens' documents, where they are separate.
    """
    mixer = dataclasses.replace(config.mixer, ldm=dataclasses.replace(config.mixer.ldm, form=Form.RECURRENT))
    graph = model_graph(config.model, mixer)
    squared = config.mixer.ldm.write is Write.SQRT_RLS  # there the state is a factor of P

    def of_block(block: Block, state: MixerState, documents: Documents | None) -> tuple[MixerState, MemoryFigures]:
        rows = []
        for sublayer, inputs in ((block.attention, (documents,)), (block.mlp, ())):
            layer = sublayer.mixer
            assert isinstance(layer, LDMLayer)
            reader, forgetting = layer.memory.reader, layer.memory.forgetting()
            condition = jnp.log10(jnp.linalg.cond(state.memory.inverse_covariance)) * (2 if squared else 1)
            gate = reader.gates(state.stream)
            x, state = layer.read(state)
            output = sublayer.function(sublayer.norm(x), *inputs)
            importance = layer.memory.writer(output, forgetting).importance
            means = (jnp.mean(each, axis=(0, 1)) for each in (gate, importance, condition))
            rows.append(MemoryFigures(forgetting, reader.gain[...], *means))
            state, _ = layer.write(state, output)
        return state, jax.tree.map(lambda *each: jnp.stack(each), *rows)

    @jax.jit
    def figures(params: object, tokens: Tokens, segments: Int[Array, "B T"] | None = None) -> MemoryFigures:
        model = nnx.merge(graph, params)
        documents = None if segments is None else make_documents(segments)
        start = model.mixer.start(model.embedding(tokens))
        _, by_block = depth_map(
            lambda block, state: of_block(block, state, documents), start, model.blocks, scan=config.model.scan
        )
        return jax.tree.map(lambda each: each.reshape(-1, each.shape[-1]), by_block)

    return figures
