"""Run by test_mesh.py in a process with eight devices: training, and restoring on several meshes.

Prints the step, the devices and shards used, whether all meshes restore the same bits, whether a frozen backbone keeps
them, and whether the statistics of a memory equal those of one device.
"""

import dataclasses
import hashlib
import io
import json
import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from ldm_jax.config import Config, MeshConfig, ModelConfig, TrainedPart
from ldm_jax.data import Batch
from ldm_jax.infer import load_model, make_memory_figures
from ldm_jax.mixers import LDMConfig, MixerConfig, MixerKind
from ldm_jax.nn import model_declarations, split_mixer
from ldm_jax.parallel import make_mesh
from ldm_jax.parameters import shardings
from ldm_jax.runs.checkpoints import Checkpoints
from ldm_jax.train import make_state, train
from runs import make_corpus, tiny


def digest(tree):
    return hashlib.blake2b(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))).hexdigest()[:16]


def error_of_figures():
    """Uses enough matrices to keep all of LAPACK's threads busy."""
    config = Config(ModelConfig(depth=2, width=64, heads=8, mlp_width=64), mesh=MeshConfig(tensor=8))
    config = dataclasses.replace(config, mixer=MixerConfig(ldm=LDMConfig(groups=8, latent_dim=8)))
    windows = Batch(np.random.default_rng(0).integers(256, size=(1, 64)).astype(np.int32), None)
    params = make_state(config).params
    expected, mesh = make_memory_figures(config)(params, windows), make_mesh(config)
    with jax.set_mesh(mesh):
        places = shardings(params, mesh, model_declarations(config.model, config.mixer))
        found = make_memory_figures(config)(jax.device_put(params, places), windows)
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))


def frozen_backbone(config, directory, params):
    """Whether a run on a mesh that starts from the other run has its backbone after some steps, sharded as there."""
    config = dataclasses.replace(
        config,
        mixer=MixerConfig(MixerKind.DENSEFORMER),
        optimizer=dataclasses.replace(config.optimizer, train=TrainedPart.MIXER),
        train=dataclasses.replace(config.train, steps=2, init=str(directory / "run")),
    )
    state = train(config, directory / "grown", Console(file=io.StringIO()))
    backbone = split_mixer(state.params)[1]
    kernel = backbone["blocks"]["mlp"]["function"]["up"]["kernel"]
    is_sharded = kernel.size == 4 * kernel.addressable_data(0).size
    return is_sharded and digest(backbone) == digest(split_mixer(params)[1])


def main() -> None:
    directory = Path(sys.argv[1])
    config = tiny(make_corpus(directory / "corpus"), steps=20, checkpoint_every=20, validate_every=20)
    on = lambda *sizes: dataclasses.replace(config, mesh=MeshConfig(*sizes))  # noqa: E731
    text = io.StringIO()
    state = train(on(2, 2, 1, 2), directory / "run", Console(file=text, width=200))
    split = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state.params)}
    kernel = state.params["blocks"]["mlp"]["function"]["up"]["kernel"]
    found = {"step": int(state.step), "devices": sorted(split), "parts": kernel.size // kernel.addressable_data(0).size}
    digests = [digest((state.params, state.optimizer))]
    for sizes in ((1, 4, 2, 1), (4, 1, 1, 2), (1, 2, 2, 2)):
        mesh = make_mesh(on(*sizes))
        checkpoints = Checkpoints(directory / "run" / "checkpoints", 2)
        restored = checkpoints.restore_latest(make_state(config, mesh))
        checkpoints.close()
        digests.append(digest((restored[0].params, restored[0].optimizer)))
    alone = load_model(directory / "run")
    found |= {"same_bits": len(set(digests)) == 1 and digest(alone.params) == digest(state.params)}
    found |= {"frozen": frozen_backbone(on(2, 2, 1, 2), directory, alone.params)}
    found |= {"same_figures": error_of_figures() < 1e-5}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
