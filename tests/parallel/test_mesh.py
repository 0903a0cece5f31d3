"""Many devices change no number; what does not fit a mesh is refused."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec

from ldm_jax.axes import Axis, MeshAxis, constrain, partition
from ldm_jax.config import Config, MeshConfig, ModelConfig
from ldm_jax.errors import UserError
from ldm_jax.mixers import MixerConfig, MixerKind
from ldm_jax.nn import init_params
from ldm_jax.parallel import check_mesh, parameter_axes

HERE = Path(__file__).parent
ALL_MESHES = [list(sizes) for sizes in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(sizes) == 8]


def on_eight_devices(script, *arguments):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / script), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Involuntary full rematerialization" not in result.stderr
    return result.stdout


def check_cases(cases):
    rows = [json.loads(line) for line in on_eight_devices("sharded_model.py", json.dumps(cases)).splitlines()]
    assert [row["case"] for row in rows] == [list(case) for case in cases]
    for row in rows:
        assert row["loss"] < 1e-5, row
        # float32 sums in another order. LDM's gradient differs more than the rivals', by up to 2.7e-5; which mesh
        # differs most changes with the model's sizes, as with rounding, which has yet to be shown in float64.
        assert row["gradient"] < (5e-5 if row["case"][0].startswith("ldm") else 1e-5), row
        assert row["leaf"] < 1e-3, row


def test_loss_and_gradient_are_those_of_one_device():
    check_cases([("ldm", [2, 2, 1, 2], True), ("ldm", [1, 2, 4, 1], False), ("mhc", [2, 1, 2, 2], True)])


@pytest.mark.slow
def test_loss_and_gradient_over_every_mesh_of_eight():
    check_cases([("ldm", sizes, True) for sizes in ALL_MESHES])


@pytest.mark.slow
def test_loss_and_gradient_of_every_mixer():
    # Every pair of mixer and mesh axis, of mixer and scan.
    ldm = ["ldm_recomputed", "ldm_stored", "ldm_dual", "ldm_sqrt"]
    rivals = ["preln", "attnres", "attnres_block", "hc", "mhc", "denseformer"]
    ways = [([2, 2, 2, 1], True), ([1, 2, 2, 2], False)]
    check_cases([(name, mesh, scan) for name in ldm + rivals for mesh, scan in ways])


def test_every_parameter_of_size_has_a_place():
    # What is left whole on every device is small: vectors, and what is not wider than a few streams.
    model = ModelConfig(depth=2, width=64, heads=4, mlp_width=96, tied=False)
    for kind in MixerKind:
        params = jax.eval_shape(lambda kind=kind: init_params(model, MixerConfig(kind), 0))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            names = tuple(part.key for part in path)
            axes = parameter_axes(names, leaf.ndim)
            assert len(axes) == leaf.ndim
            assert axes.count(None) < leaf.ndim or leaf.size <= 2 * 64 * 8, names


def test_partition():
    mesh = {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}
    assert partition((8, 6, 4), (Axis.BATCH, Axis.TOKENS, Axis.GROUPS), mesh) == PartitionSpec(
        ("data", "fsdp"), None, "tensor"
    )
    assert partition((6, 6, 3), (Axis.BATCH, Axis.TOKENS, Axis.GROUPS), mesh) == PartitionSpec(None, None, None)
    with pytest.raises(ValueError, match="the array's shape is"):
        partition((2, 2), (Axis.BATCH,), mesh)
    x = jax.numpy.ones(3)
    assert constrain(x, Axis.BATCH) is x  # no mesh


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": MeshConfig(tensor=3)}, "does not fit 8 devices: the product must be 8"),
        ({"mesh": MeshConfig(data=4)}, "the mesh data 4 x fsdp 1 x context 1 x tensor 1 does not fit 8 devices"),
        ({"mesh": MeshConfig(tensor=8), "model": ModelConfig(heads=4)}, r"heads is 4, which mesh.tensor = 8 does not"),
        ({"mesh": MeshConfig(tensor=8), "model": ModelConfig(heads=8, kv_heads=4)}, "kv_heads is 4"),
        ({"mesh": MeshConfig(tensor=8), "model": ModelConfig(heads=8)}, "mixer.ldm.groups is 4"),
        ({"mesh": MeshConfig(fsdp=2, context=4), "train": {"batch_size": 3}}, "batch_size / train.accumulation is 3"),
        ({"mesh": MeshConfig(context=8), "data": {"context": 100}}, "data.context is 100, which mesh.context = 8"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    config = Config()
    for name, value in changes.items():
        changed = dataclasses.replace(getattr(config, name), **value) if isinstance(value, dict) else value
        config = dataclasses.replace(config, **{name: changed})
    with pytest.raises((UserError, ValueError), match=words):
        check_mesh(config, config.mesh.sizes(8))


def test_sizes():
    assert list(MeshConfig(fsdp=2).sizes(8).values()) == [4, 2, 1, 1]
    assert MeshConfig().sizes(1) == dict.fromkeys(MeshAxis, 1)
    with pytest.raises(ValueError, match="fsdp is 0, but it must be at least 1"):
        MeshConfig(fsdp=0)


def test_training_on_a_mesh_and_its_checkpoint_on_others(tmp_path):
    found = json.loads(on_eight_devices("sharded_training.py", str(tmp_path)).splitlines()[-1])
    # The MLP's kernel is split in four: by fsdp and by tensor.
    assert found == {"step": 20, "devices": [8], "parts": 4, "same_bits": True}
