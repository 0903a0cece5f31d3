"""Run by test_mesh.py in a process of its own, on eight devices: loss and gradient of a model over meshes.

Prints a line for each case: the difference to one device, of the loss; of the whole gradient, relative to its length;
and the largest of one parameter's gradient, relative to its largest entry.
"""

import dataclasses
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ldm_jax.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from ldm_jax.memory.depth_scan import Backward
from ldm_jax.mixers import (
    AttnResBlockConfig,
    DenseFormerConfig,
    Form,
    HyperConfig,
    LDMConfig,
    MHCConfig,
    MixerConfig,
    MixerKind,
    Write,
)  # fmt: skip
from ldm_jax.nn import init_params, model_graph, target_weights
from ldm_jax.parallel import batch_sharding, make_mesh, shardings

MODEL = ModelConfig(depth=2, width=16, heads=8, mlp_width=24, loss_chunk=16)
LDM = LDMConfig(groups=8, key_dim=4, latent_dim=8)
MIXERS = {
    "ldm": MixerConfig(ldm=LDM),
    "ldm_recomputed": MixerConfig(ldm=LDM, backward=Backward.RECOMPUTED),
    "ldm_stored": MixerConfig(ldm=LDM, backward=Backward.STORED),
    "ldm_dual": MixerConfig(ldm=dataclasses.replace(LDM, form=Form.DUAL)),
    "ldm_sqrt": MixerConfig(ldm=dataclasses.replace(LDM, write=Write.SQRT_RLS, learned_alpha=True)),
    "preln": MixerConfig(MixerKind.PRELN),
    "attnres": MixerConfig(MixerKind.ATTNRES),
    "attnres_block": MixerConfig(MixerKind.ATTNRES_BLOCK, attnres_block=AttnResBlockConfig(block_size=2)),
    "hc": MixerConfig(MixerKind.HC, hc=HyperConfig(streams=2)),
    "mhc": MixerConfig(MixerKind.MHC, mhc=MHCConfig(streams=2)),
    "denseformer": MixerConfig(MixerKind.DENSEFORMER, denseformer=DenseFormerConfig()),
}


def make_config(mixer, mesh, scan):
    model = dataclasses.replace(MODEL, scan=scan)
    return Config(model, MIXERS[mixer], DataConfig(context=16), train=TrainConfig(batch_size=8), mesh=MeshConfig(*mesh))


def gradient(config, params, tokens, segments):
    graph = model_graph(config.model, config.mixer)

    def loss(params):
        losses = nnx.merge(graph, params).token_losses(tokens[:, :-1], tokens[:, 1:], segments[:, :-1])
        return jnp.mean(target_weights(tokens, segments) * losses.cross_entropy)

    return jax.jit(jax.value_and_grad(loss))(params)


def differences(found, expected):
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(found, expected, strict=True)]
    distance = math.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))
    length = math.sqrt(sum(np.sum(b**2) for _, b in pairs))
    leaf = max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) for a, b in pairs)
    return {"gradient": distance / length, "leaf": float(leaf)}


def compare(mixer, mesh_sizes, scan):
    config = make_config(mixer, mesh_sizes, scan)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (8, 17), np.int32)
    segments = np.sort(rng.integers(1, 4, (8, 17)), axis=1).astype(np.int32)
    params = init_params(config.model, config.mixer, 0)
    expected = gradient(config, params, jnp.asarray(tokens), jnp.asarray(segments))
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(params, mesh))
        actual = gradient(config, placed, *jax.device_put((tokens, segments), batch_sharding(mesh)))
    found = differences(*map(jax.tree.leaves, (actual[1], expected[1])))
    return {"loss": abs(float(actual[0]) - float(expected[0])), **found}


def main() -> None:
    assert jax.device_count() == 8
    for mixer, mesh, scan in json.loads(sys.argv[1]):
        print(json.dumps({"case": [mixer, mesh, scan], **compare(mixer, mesh, scan)}), flush=True)


if __name__ == "__main__":
    main()
