"""Figures of a depth memory: read gains and gates, importance, forgetting, condition numbers."""

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
from ldm_jax.mixers import DepthMemoryConfig, Form, MixerState, Write
from ldm_jax.mixers.depth_memory import Reader
from ldm_jax.mixers.ldm import LDMLayer
from ldm_jax.nn import Params, model_graph
from ldm_jax.nn.attention import Documents, make_documents
from ldm_jax.nn.block import Block
from ldm_jax.sharding import constrain
from ldm_jax.typing import Tokens


class MemoryFigures(NamedTuple):
    """Of every sublayer and group; means over all tokens."""

    forgetting: Float[np.ndarray, "N G"]
    gain: Float[np.ndarray, "N G"]
    gate: Float[np.ndarray, "N G"]
    importance: Float[np.ndarray, "N G"]
    log10_condition: Float[np.ndarray, "N G"]
    """Mean of the logarithm of the condition number of `P` when the sublayer reads."""


def make_memory_figures(config: Config) -> Callable[[Params, Batch], MemoryFigures]:
    """A function of parameters and windows, for the mixer ldm. Its figures are the same for every form."""
    options = config.mixer.options
    assert isinstance(options, DepthMemoryConfig)
    graph = model_graph(config.model, config.mixer.with_options(form=Form.RECURRENT))

    def of_block(block: Block, state: MixerState, documents: Documents | None) -> tuple[MixerState, dict[str, Array]]:
        rows = []
        for sublayer, inputs in ((block.attention, (documents,)), (block.mlp, ())):
            layer = sublayer.mixer
            assert isinstance(layer, LDMLayer)
            row = read_figures(layer.memory.reader, state)
            x, state = layer.read(state)
            output = sublayer.function(sublayer.norm(x), *inputs)
            forgetting = layer.memory.forgetting()
            rows.append(row | write_figures(forgetting, layer.memory.writer(output, forgetting).importance))
            state, _ = layer.write(state, output)
        return state, jax.tree.map(lambda *each: jnp.stack(each), *rows)

    @jax.jit
    def on_devices(params: Params, tokens: Tokens, segments: Int[Array, "B T"] | None) -> dict[str, Array]:
        model = nnx.merge(graph, params)
        documents = None if segments is None else make_documents(segments)
        start = model.mixer.start(model.embedding(tokens))
        _, by_block = depth_map(
            lambda block, state: of_block(block, state, documents), start, model.blocks, scan=config.model.scan
        )
        by_sublayer = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), by_block)
        # Replicated, so that every process can read them.
        return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), by_sublayer)

    def figures(params: Params, windows: Batch) -> MemoryFigures:
        rows = jax.device_get(on_devices(params, *windows))
        return MemoryFigures(**replace_covariance(rows, options.write))

    return figures


def read_figures(reader: Reader, state: MixerState) -> dict[str, Array]:
    """Gain and gate `[G]` of a read; the covariance `[B, T, G, K, K]`, if the write has one."""
    figures = {"gain": reader.gain[...], "gate": jnp.mean(reader.gates(state.stream), axis=(0, 1))}
    covariance = state.memory.covariance
    return figures if covariance is None else figures | {"covariance": covariance.matrix}


def write_figures(forgetting: Float[Array, " G"], importance: Float[Array, "B T G"]) -> dict[str, Array]:
    """Forgetting and importance `[G]` of a write."""
    return {"forgetting": forgetting, "importance": jnp.mean(importance, axis=(0, 1))}


def replace_covariance(figures: dict[str, np.ndarray], write: Write) -> dict[str, np.ndarray]:
    """The figures of reads with `log10_condition` `[N, G]` in place of `covariance`; 0 if the write has none."""
    others = {name: values for name, values in figures.items() if name != "covariance"}
    if "covariance" not in figures:
        return others | {"log10_condition": np.zeros_like(figures["gain"])}
    return others | {"log10_condition": _log10_condition(figures["covariance"], write)}


def _log10_condition(covariance: Float[np.ndarray, "N B T G K K"], write: Write) -> Float[np.ndarray, "N G"]:
    """Means over tokens of the logarithm of the largest eigenvalue over the smallest.

    Infinite if a `P` is singular; all nan if any is not finite. NumPy computes it, because LAPACK calls of JAX 0.10 can
    deadlock on a CPU of several devices.
    """
    if not np.isfinite(covariance).all():
        return np.full((covariance.shape[0], covariance.shape[3]), np.nan)
    means = []
    for P in covariance:  # one at a time, to save memory
        P = P.astype(np.float64)
        values = np.abs(np.linalg.eigvalsh(P @ P.mT if write is Write.SQRT_RLS else P))  # of a factor
        with np.errstate(divide="ignore"):
            means.append(np.mean(np.log10(values.max(axis=-1)) - np.log10(values.min(axis=-1)), axis=(0, 1)))
    return np.stack(means)
