"""Run by test_generation_on_a_mesh.py in a process with eight devices: sampling, and a memory alone.

Prints a line for each case: the largest difference to one device of the logits after the prompts (or of the readout),
whether the tokens are the same, and the number of shards of the cache.
"""

import itertools
import json
import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ldm_jax.config import Config, MeshConfig, ModelConfig
from ldm_jax.infer import Sampling, generate
from ldm_jax.infer.generation import read_prompts
from ldm_jax.mixers import DepthMemory, LDMConfig, MixerConfig, MixerKind, init_memory
from ldm_jax.nn import init_params, model_declarations, model_graph
from ldm_jax.parallel import make_mesh
from ldm_jax.parameters import shardings

MODEL = ModelConfig(depth=2, width=64, heads=4, kv_heads=2, mlp_width=96)
LDM = LDMConfig(groups=4, key_dim=4, latent_dim=8)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9, 10, 11], [200]]
MESH = (1, 2, 2, 2)
CONTEXT = 16


def sample(graph, params):
    """The state after the prompts, and greedy and random tokens past the end of the cache."""
    tokens = []
    for temperature in (0.0, 1.0):
        drawn = generate(graph, params, PROMPTS, CONTEXT, sampling=Sampling(temperature=temperature), chunk=4)
        tokens += [each.tolist() for each in itertools.islice(drawn, CONTEXT)]
    return read_prompts(graph, params, PROMPTS, CONTEXT, chunk=4), tokens


def difference(a, b):
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def generation(kind):
    mixer = MixerConfig(MixerKind(kind), ldm=LDM)
    graph, params = model_graph(MODEL, mixer), init_params(MODEL, mixer, 0)
    one, expected = sample(graph, params)
    mesh = make_mesh(Config(MODEL, mixer, mesh=MeshConfig(*MESH)))
    with jax.set_mesh(mesh):
        state, tokens = sample(graph, jax.device_put(params, shardings(params, mesh, model_declarations(MODEL, mixer))))
    key = state.cache.layers.key
    parts = key.size // key.addressable_data(0).size
    return {"difference": difference(state.logits, one.logits), "same": tokens == expected, "parts": parts}


def memory_alone(_):
    """A memory in a model without sharding constraints: the compiler chooses the sharding of its output."""
    graph, params = nnx.split(DepthMemory(64, 4, LDM, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    x, kernel = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 4, 64), (64, 64)))

    @jax.jit
    def readout(params, x, kernel):
        memory = nnx.merge(graph, params)
        state = memory.write(init_memory((4, 4), 64, LDM), x)
        x = x + memory.read(state, x)
        return memory.read(memory.write(state, x @ kernel / 8), x)

    expected = readout(params, x, kernel)
    mesh = make_mesh(Config(MODEL, mesh=MeshConfig(*MESH)))
    split = NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
    with jax.set_mesh(mesh):
        found = readout(params, x, jax.device_put(kernel, split))
    return {"difference": difference(found, expected)}


def main() -> None:
    assert jax.device_count() == 8
    for name in sys.argv[1:]:
        found = (memory_alone if name == "alone" else generation)(name)
        print(json.dumps({"name": name, "mesh": MESH, **found}), flush=True)


if __name__ == "__main__":
    main()
