"""A mesh does not change results; configs that do not fit a mesh are refused."""

import dataclasses
import json

import jax
import pytest
from jax.sharding import PartitionSpec

from cases import ALL_MESHES, Case
from eight_devices import check_cases, on_eight_devices
from ldm_jax.config import AttentionImplementation, ComputeType, Config, MeshConfig, ModelConfig
from ldm_jax.errors import UserError
from ldm_jax.mixers import MixerConfig, MixerKind
from ldm_jax.nn import init_params, model_declarations
from ldm_jax.parallel import check_mesh
from ldm_jax.sharding import Axis, MeshAxis, constrain, partition


def test_loss_and_gradient_are_those_of_one_device():
    check_cases([Case(mesh=(1, 2, 2, 2), accumulation=2)])


@pytest.mark.slow
def test_loss_and_gradient_with_and_without_data_and_scan():
    check_cases([Case(mesh=(2, 2, 1, 2)), Case(mesh=(1, 2, 4, 1), scan=False, type="float32")])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_loss_and_gradient_over_every_mesh_of_eight():
    check_cases([Case(mesh=sizes, type="float32") for sizes in ALL_MESHES])
    check_cases([Case(mesh=sizes) for sizes in ALL_MESHES[::4]])


@pytest.mark.slow
def test_loss_and_gradient_of_the_fused_form():
    check_cases([
        Case(mesh=(2, 2, 1, 2), form="fused"),
        Case(mesh=(1, 2, 2, 2), form="fused", backward="stored", accumulation=2, options="others"),
        Case("sqrt_rls", mesh=(1, 1, 4, 2), form="fused", scan=False),
    ])  # fmt: skip


def test_every_large_parameter_is_sharded():
    # Only small parameters are replicated: vectors, and matrices as wide as a few streams.
    model = ModelConfig(depth=2, width=64, heads=4, mlp_width=96, tied=False)
    for kind in MixerKind:
        params = jax.eval_shape(lambda kind=kind: init_params(model, MixerConfig(kind), 0))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            names = tuple(part.key for part in path)
            axes = model_declarations(model, MixerConfig(kind))[names].axes
            assert len(axes) <= leaf.ndim
            assert any(axes) or leaf.size <= 2 * 64 * 8, names


def test_partition():
    mesh = {"data": 2, "fsdp": 2, "context": 1, "tensor": 2}
    assert partition((8, 6, 4), (Axis.BATCH, Axis.TOKENS, Axis.GROUPS), mesh) == PartitionSpec(
        ("data", "fsdp"), None, "tensor"
    )
    assert partition((6, 6, 3), (Axis.BATCH, Axis.TOKENS, Axis.GROUPS), mesh) == PartitionSpec(None, None, None)
    with pytest.raises(ValueError, match="length 1"):
        partition((2, 2), (Axis.BATCH,), mesh)
    with pytest.raises(ValueError, match="batch and width of one array both lie along the mesh's fsdp"):
        partition((8, 8), (Axis.BATCH, Axis.WIDTH), mesh)
    with pytest.raises(ValueError, match="heads and heads of one array both lie along the mesh's tensor"):
        partition((8, 8), (Axis.HEADS, Axis.HEADS), mesh)
    x = jax.numpy.ones(3)
    assert constrain(x, Axis.BATCH) is x  # no mesh


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"mesh": MeshConfig(tensor=3)},
            "fsdp 1 x context 1 x tensor 3 does not fit 8 devices: the product must divide",
        ),
        ({"mesh": MeshConfig(data=4)}, "the mesh data 4 x fsdp 1 x context 1 x tensor 1 does not fit 8 devices"),
        ({"mesh": MeshConfig(tensor=8), "model": ModelConfig(heads=4)}, r"heads is 4, which mesh.tensor = 8 does not"),
        ({"mesh": MeshConfig(tensor=8), "model": ModelConfig(heads=8, kv_heads=4)}, "kv_heads is 4"),
        ({"mesh": MeshConfig(tensor=8), "model": ModelConfig(heads=8)}, "mixer.ldm.groups is 4"),
        ({"mesh": MeshConfig(fsdp=2, context=4), "train": {"batch_size": 3}}, "batch_size / train.accumulation is 3"),
        (
            {
                "mesh": MeshConfig(context=4),
                "model": {"attention": AttentionImplementation.CUDNN, "compute_dtype": ComputeType.BFLOAT16},
            },
            "mesh.context is 4, .*cudnn",
        ),
        (
            {"mesh": MeshConfig(context=4), "model": {"attention": AttentionImplementation.FLASH}},
            "64 tokens of a window .*flash",
        ),
        ({"mesh": MeshConfig(context=8), "data": {"context": 100}}, "data.context is 100, which mesh.context = 8"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes, words):
    config = Config()
    for name, value in changes.items():
        changed = dataclasses.replace(getattr(config, name), **value) if isinstance(value, dict) else value
        config = dataclasses.replace(config, **{name: changed})
    with pytest.raises((UserError, ValueError), match=words):
        check_mesh(config, config.mesh.sizes(8, config.train.batch_size))


def test_sizes():
    assert list(MeshConfig(fsdp=2).sizes(8, 16).values()) == [4, 2, 1, 1]
    assert list(MeshConfig(fsdp=2).sizes(8, 4).values()) == [2, 2, 1, 1]  # four devices stay idle
    assert MeshConfig().sizes(8, 3) == dict.fromkeys(MeshAxis, 1)
    assert MeshConfig().sizes(1, 3) == dict.fromkeys(MeshAxis, 1)
    with pytest.raises(ValueError, match="fsdp is 0, but it must be at least 1"):
        MeshConfig(fsdp=0)


@pytest.mark.slow
def test_a_checkpoint_of_a_mesh_is_restored_on_others(tmp_path):
    found = json.loads(on_eight_devices("sharded_training.py", str(tmp_path)).splitlines()[-1])
    # The MLP's kernel is sharded over fsdp and tensor, two each.
    assert found == {
        "step": 20, "devices": [8], "parts": 4, "same_bits": True, "frozen": True, "same_figures": True,
    }  # fmt: skip
