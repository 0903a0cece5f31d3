"""Run by test_import_on_a_mesh.py in a process with eight devices: logits of imported checkpoints, sharded.

Prints a line for each case: the largest difference to the recorded logits, relative to the largest of them, and the
number of shards of the embedding.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ldm_jax.config import Config, MeshConfig
from ldm_jax.convert import Weights, hf_layout, load_params, read_hf_config
from ldm_jax.convert.weights import PRELN
from ldm_jax.nn import model_graph
from ldm_jax.parallel import make_mesh

CASES = Path(__file__).parents[1] / "convert" / "cases"


def main(cases):
    mesh = make_mesh(Config(mesh=MeshConfig(1, 2, 2, 2)))
    with jax.set_mesh(mesh):
        for name in cases:
            model = read_hf_config(CASES / name).model
            params = load_params(Weights(CASES / name), hf_layout(model), mesh)
            recorded = np.load(CASES / name / "expected.npz")
            graph, tokens = model_graph(model, PRELN), jnp.asarray(recorded["ids"])
            logits = jax.jit(lambda params, graph=graph, tokens=tokens: nnx.merge(graph, params)(tokens))(params)
            difference = np.abs(np.asarray(logits) - recorded["logits"]).max() / np.abs(recorded["logits"]).max()
            shards = {str(shard.index) for shard in params["embed"]["embedding"].addressable_shards}
            print(json.dumps({"name": name, "difference": float(difference), "shards": len(shards)}))


if __name__ == "__main__":
    main(sys.argv[1:])
