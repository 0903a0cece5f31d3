"""A small model over bytes, and the scores of its tokens by hand."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ldm_jax.config import Config, DataConfig, ModelConfig
from ldm_jax.data import ByteTokenizer
from ldm_jax.infer import Model
from ldm_jax.infer.scoring import cut_windows
from ldm_jax.mixers import MixerConfig
from ldm_jax.nn import init_params, model_graph

CONTEXT = 48
CONFIG = Config(
    ModelConfig(depth=1, width=16, heads=2, mlp_width=16, loss_chunk=40),
    MixerConfig(kind="preln"),
    DataConfig(context=CONTEXT),
)


def make_model():
    params = jax.tree.map(lambda x: 2 * x, init_params(CONFIG.model, CONFIG.mixer, 0))  # far from uniform
    graph = model_graph(CONFIG.model, CONFIG.mixer)
    return Model(Path("run"), CONFIG, graph, params, ByteTokenizer(), 1, False, "")


def by_hand(model, before, tokens):
    """Token by token, from the logits after the last T tokens that `cut_windows` leaves."""
    total, greedy = 0.0, True
    for window in cut_windows(before, tokens, CONTEXT):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(window.tokens) - 1] = window.tokens[:-1]
        logits = np.asarray(model.logits(jnp.asarray(padded))[0], np.float64)
        for place in range(len(window.tokens) - 1 - window.scored, len(window.tokens) - 1):
            target = window.tokens[place + 1]
            total += logits[place, target] - np.log(np.sum(np.exp(logits[place] - logits[place].max())))
            total -= logits[place].max()
            greedy &= bool(logits[place].argmax() == target)
    return total, greedy
