"""What a depth memory does at every sublayer, for the log of a run."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ldm_jax.config import Config
from ldm_jax.data import Batch
from ldm_jax.memory.depth_scan import depth_map
from ldm_jax.mixers import Form, MixerState, Write
from ldm_jax.mixers.ldm import LDMLayer
from ldm_jax.nn import Params, model_graph
from ldm_jax.nn.attention import Documents, make_documents
from ldm_jax.nn.block import Block
from ldm_jax.sharding import constrain
from ldm_jax.typing import Tokens


class MemoryFigures(NamedTuple):
    """Of every sublayer and group; means over tokens."""

    forgetting: Float[np.ndarray, "N G"]
    gain: Float[np.ndarray, "N G"]
    gate: Float[np.ndarray, "N G"]
    importance: Float[np.ndarray, "N G"]
    log10_condition: Float[np.ndarray, "N G"]
    """Of the inverse covariance that the sublayer reads with."""


def make_memory_figures(config: Config) -> Callable[[Params, Batch], MemoryFigures]:
    """A function of parameters and windows, for the mixer ldm: means over all tokens of the windows.

    The numbers are the same for each form. A condition is the ratio of the largest and the smallest eigenvalue of `P`:
    infinite if it is singular; all conditions are nan if any `P` is not finite.
    """
    mixer = dataclasses.replace(config.mixer, ldm=dataclasses.replace(config.mixer.ldm, form=Form.RECURRENT))
    graph = model_graph(config.model, mixer)

    def of_block(block: Block, state: MixerState, documents: Documents | None) -> tuple[MixerState, list[Array]]:
        rows = []
        for sublayer, inputs in ((block.attention, (documents,)), (block.mlp, ())):
            layer = sublayer.mixer
            assert isinstance(layer, LDMLayer)
            reader, forgetting = layer.memory.reader, layer.memory.forgetting()
            covariance, gate = state.memory.inverse_covariance, reader.gates(state.stream)
            x, state = layer.read(state)
            output = sublayer.function(sublayer.norm(x), *inputs)
            importance = layer.memory.writer(output, forgetting).importance
            means = (jnp.mean(each, axis=(0, 1)) for each in (gate, importance))
            rows.append([forgetting, reader.gain[...], *means, covariance])
            state, _ = layer.write(state, output)
        return state, jax.tree.map(lambda *each: jnp.stack(each), *rows)

    @jax.jit
    def on_devices(params: Params, tokens: Tokens, segments: Int[Array, "B T"] | None) -> list[Array]:
        model = nnx.merge(graph, params)
        documents = None if segments is None else make_documents(segments)
        start = model.mixer.start(model.embedding(tokens))
        _, by_block = depth_map(
            lambda block, state: of_block(block, state, documents), start, model.blocks, scan=config.model.scan
        )
        by_sublayer = [each.reshape(-1, *each.shape[2:]) for each in by_block]
        # Whole on every device, so that every process can read them.
        return [constrain(each, *[None] * each.ndim) for each in by_sublayer]

    def figures(params: Params, windows: Batch) -> MemoryFigures:
        forgetting, gain, gate, importance, covariance = jax.device_get(on_devices(params, *windows))
        condition = _log10_condition(covariance, config.mixer.ldm.write).mean(axis=(1, 2))
        return MemoryFigures(forgetting, gain, gate, importance, condition)

    return figures


def _log10_condition(state: Float[np.ndarray, "N B T G K K"], write: Write) -> Float[np.ndarray, "N B T G"]:
    """Of P. On the host: on a CPU of several devices, LAPACK's calls by JAX 0.10 wait for each other for ever."""
    P = state.astype(np.float64)
    if write is Write.SQRT_RLS:
        P = P @ P.mT  # of a factor
    if not np.isfinite(P).all():
        return np.full(P.shape[:-2], np.nan)
    values = np.abs(np.linalg.eigvalsh(P))
    with np.errstate(divide="ignore"):  # a singular one's is infinite
        return np.log10(values.max(axis=-1)) - np.log10(values.min(axis=-1))
