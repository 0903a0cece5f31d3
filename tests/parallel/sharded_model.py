"""Run by test_mesh.py in a process with eight devices: loss and gradient of a training step on meshes.

Prints a line for each case, with differences to one device: of the loss; of the whole gradient, relative to its norm;
and the largest of one parameter's gradient, relative to its largest entry.
"""

import functools
import json
import math
import sys

import jax
import numpy as np
import optax

from cases import Case
from doubled import in_float64
from ldm_jax.data import Batch
from ldm_jax.nn import model_declarations
from ldm_jax.parallel import make_mesh
from ldm_jax.parameters import shardings
from ldm_jax.sharding import batch_sharding
from ldm_jax.train import make_state, make_train_step


def perturbed(params):
    """Perturbs the parameters, so that gates and norms are not at special values and no gradient is zero."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: leaf + 0.05 * rng.normal(size=leaf.shape).astype(np.float32), params)


def make_batch(case):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (16, 17), np.int32)
    segments = np.sort(rng.integers(1, 4, tokens.shape), axis=1).astype(np.int32)
    return Batch(tokens, segments if case.documents else None)


def loss_and_gradient(case, step, state, batch):
    state, metrics = (in_float64(step) if case.type == "float64" else step)(state, batch)
    return metrics.loss, jax.tree.leaves([mean for _, mean in optax.tree.get_all_with_path(state.optimizer, "mu")])


def start(config):
    state = make_state(config)
    return state._replace(params=perturbed(state.params))


@functools.cache
def on_one_device(case):
    config = case.config()
    return loss_and_gradient(case, make_train_step(config), start(config), make_batch(case))


def compare(case):
    config, batch = case.config(), make_batch(case)
    one_loss, expected = on_one_device(case._replace(mesh=(1, 1, 1, 1)))  # the same for every mesh
    mesh = make_mesh(config)
    state = start(config)
    placed = jax.device_put(state, shardings(state, mesh, model_declarations(config.model, config.mixer)))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(batch, batch_sharding(mesh))
        loss, found = loss_and_gradient(case, make_train_step(config, mesh), placed, sharded)
    assert len(found) == len(jax.tree.leaves(state.params))
    assert {leaf.dtype for leaf in [*found, *expected, loss]} == {np.dtype(case.type)}
    assert any(len(leaf.sharding.device_set) == 8 for leaf in found)
    return {"loss": abs(float(loss) - float(one_loss)), **differences(found, expected)}


def differences(found, expected):
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(found, expected, strict=True)]
    distance = math.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))
    length = math.sqrt(sum(np.sum(b**2) for _, b in pairs))
    leaf = max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) for a, b in pairs)
    return {"gradient": distance / length, "leaf": float(leaf)}


def main() -> None:
    assert jax.device_count() == 8
    for chosen in json.loads(sys.argv[1]):
        case = Case(**chosen | {"mesh": tuple(chosen["mesh"])})
        print(json.dumps({"case": case._asdict(), **compare(case)}), flush=True)


if __name__ == "__main__":
    main()
