"""Costs of programs compiled for absent TPU pods. Tests that need the TPU compiler are skipped without it."""

import dataclasses
import importlib.util
import math
import re
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from ldm_jax.bench import training as bench
from ldm_jax.config import (
    AttentionImplementation,
    ComputeType,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from ldm_jax.config.toml import read_config
from ldm_jax.errors import UserError
from ldm_jax.mixers import Form, LDMConfig, MixerConfig, MixerKind
from ldm_jax.nn import count_parameters, init_params
from ldm_jax.roofline.bounds import ProgramCosts, decode_costs, train_step_costs
from ldm_jax.roofline.chips import chip_rates
from ldm_jax.roofline.compile import compile_gradient, cost_analysis, tpu_chip, tpu_devices
from ldm_jax.roofline.counts import hbm_bytes
from ldm_jax.roofline.hlo import parse_program
from ldm_jax.roofline.mesh_search import parse_mesh, ranked_meshes
from ldm_jax.roofline.text import print_costs, print_search

CONFIGS = Path(__file__).parents[2] / "configs"
with_tpu_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
MODEL = ModelConfig(
    depth=4, width=256, heads=2, mlp_width=512, vocabulary=1024, tied=False,
    compute_dtype=ComputeType.BFLOAT16, attention=AttentionImplementation.FLASH,
)  # fmt: skip


def small(kind=MixerKind.PRELN, mesh=None, **model):
    return Config(
        dataclasses.replace(MODEL, **model),
        MixerConfig(kind, ldm=LDMConfig(groups=2, key_dim=4, latent_dim=16)),
        DataConfig(context=512),
        train=TrainConfig(batch_size=8),
        mesh=mesh or MeshConfig(),
    )


def parameters(config):
    return sum(count_parameters(jax.eval_shape(lambda: init_params(config.model, config.mixer, 0))).values())


@pytest.fixture(autouse=True)
def no_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # otherwise JAX does not apply the change
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.mark.slow
@with_tpu_compiler
def test_a_step_over_data_alone():
    config = small()
    found = train_step_costs(config, tpu_devices("v5e:2x2"))
    assert found.mesh == {"data": 4, "fsdp": 1, "context": 1, "tensor": 1}
    # Only gradients in bfloat16, and sums of a few numbers.
    assert found.collective_bytes == {"all-reduce": pytest.approx(2 * 0.75 * 2 * parameters(config), rel=0.05)}
    # Forward, recomputed (but for each block's last matmul, which no gradient needs), and twice backward; attention's
    # kernel forward, recomputed, and backward, half of each masked.
    width, hidden, length = 256, 512, 512
    block = 4 * width**2 + 3 * width * hidden
    per_token = 4 * (8 * block - 2 * width * hidden) + 8 * width * 1024 + 4 * (2 + 2 + 5) * length * width
    assert found.matmul_flops == 8 * length / 4 * per_token
    assert found.argument_bytes == pytest.approx(12 * parameters(config), rel=0.02)  # and two moments
    assert found.peak_bytes > found.argument_bytes
    assert found == train_step_costs(config, tpu_devices("v5e:2x2"))  # cached
    assert train_step_costs(config, tpu_devices("v6e:2x2")).chip == "TPU v6 lite"


@pytest.mark.slow
@with_tpu_compiler
def test_a_step_over_slices_and_every_axis():
    config = small(MixerKind.LDM, MeshConfig(fsdp=2, context=2, tensor=2))
    found = train_step_costs(config, tpu_devices("v5e:2x4", slices=2))
    assert found.slices == 2
    assert found.mesh == {"data": 2, "fsdp": 2, "context": 2, "tensor": 2}
    between = {kind for kind in found.collective_bytes if kind.endswith(" between slices")}
    assert between == {"all-reduce between slices"}  # gradients, and nothing else
    assert "collectives between slices" in found.bounds
    with pytest.raises(UserError, match=r"mesh\.data is 1.* slices, 2"):
        train_step_costs(small(mesh=MeshConfig(fsdp=8, tensor=2)), tpu_devices("v5e:2x4", slices=2))


@pytest.mark.slow
@with_tpu_compiler
def test_kernels_are_split_over_chips():
    # Each device runs attention's and the memory's kernels on its own rows, tokens and heads or groups.
    config = small(MixerKind.LDM, MeshConfig(fsdp=2, context=2, tensor=2))
    fused = dataclasses.replace(config.mixer, ldm=dataclasses.replace(config.mixer.ldm, form=Form.FUSED))
    found = train_step_costs(dataclasses.replace(config, mixer=fused), tpu_devices("v5e:2x4"))
    assert found.out_of_memory is None
    recurrent = train_step_costs(config, tpu_devices("v5e:2x4"))
    assert found.matmul_flops == pytest.approx(recurrent.matmul_flops, rel=0.01)
    assert found.sent_bytes == pytest.approx(recurrent.sent_bytes, rel=0.05)


@pytest.mark.slow
@with_tpu_compiler
def test_a_program_that_does_not_fit(capsys):
    config = small(vocabulary=300_000_000)
    assert not print_costs("a model", config, tpu_devices("v5e:2x2"), train_step_costs)
    assert re.search(r"does not fit: Ran out of memory .*15.75G", capsys.readouterr().out)


@pytest.mark.slow
@with_tpu_compiler
def test_a_decoding_step_reads_parameters_and_caches():
    config = small()
    found = decode_costs(config, tpu_devices("v5e:2x2")[:1])
    caches = 2 * 4 * 8 * 512 * 256 * 2  # keys and values, blocks, sequences, places, width, bytes
    assert 4 * parameters(config) + caches < found.argument_bytes < 1.05 * (4 * parameters(config) + caches)
    assert found.collective_bytes == {}
    assert found.hbm_bytes > 4 * parameters(config)


@pytest.mark.slow
@with_tpu_compiler
def test_hbm_bytes_are_near_the_compilers_count_without_loops():
    config = bench.preln().config(bench.TPU_SIZE, 2, scan=False, attention=AttentionImplementation.LOCAL)
    compiled = compile_gradient(config, tpu_chip("v5e:2x2"), count_hbm_bytes=True)
    # The compiler counts an operand once per use in a fusion; `hbm_bytes` counts it once.
    assert 0.9 < hbm_bytes(parse_program(compiled.as_text())) / cost_analysis(compiled)["bytes accessed"] < 1.02


@pytest.mark.slow
@with_tpu_compiler
def test_a_search(capsys):
    assert print_search("a model", small(), tpu_devices("v5e:2x2"), train_step_costs)
    lines = capsys.readouterr().out.splitlines()
    assert "4 chips (TPU v5 lite)" in lines[0]
    best = lines[lines.index("those that fit, by step time, then by bytes sent:") + 1 :]
    times = [float(re.search(r"([\d.]+) ms", line)[1]) for line in best]
    assert len(times) == 6
    assert times == sorted(times)


def test_bounds():
    costs = ProgramCosts(
        "TPU v5 lite", {"data": 4}, 2, None, matmul_flops=197e12, model_flops=98.5e12, hbm_bytes=81.9e9,
        collective_bytes={"all-gather": 10e9, "all-reduce": 10e9, "all-reduce between slices": 12.5e9},
    )  # fmt: skip
    assert costs.bounds == pytest.approx(
        {"matmuls": 1, "HBM bytes": 0.1, "collectives": 0.1, "collectives between slices": 4}
    )
    assert costs.utilisation_bound == pytest.approx(0.125)
    with pytest.raises(UserError, match="a toaster"):
        chip_rates("a toaster")


@pytest.mark.parametrize("name", ["400m", "1.5b"])
def test_meshes_are_ranked(name):
    config = read_config(CONFIGS / f"{name}_ldm.toml")
    rates = chip_rates("TPU v5 lite")
    found = ranked_meshes(config, 256, rates)
    meshes = [each.mesh for each in found]
    assert len(set(meshes)) == len(meshes)
    assert all(math.prod(dataclasses.astuple(mesh)) == 256 for mesh in meshes)
    fits = [each.bytes <= rates.hbm_capacity for each in found]
    assert fits == sorted(fits, reverse=True)
    assert meshes[0].tensor == meshes[0].context == 1  # they send more than fsdp
    assert all(each.mesh.data % 4 == 0 for each in ranked_meshes(config, 256, rates, slices=4))
    with pytest.raises(UserError, match="7 chips"):
        ranked_meshes(config, 7, rates)


@pytest.mark.parametrize("topology", ["", "v5e", "v5e:", "2x2", "v5e:2x2 "])
def test_an_invalid_slice(topology):
    with pytest.raises(UserError, match=f'"{topology}" is not a TPU slice'):
        tpu_devices(topology)


def test_parse_mesh():
    assert parse_mesh("data=16, fsdp=4") == MeshConfig(data=16, fsdp=4)
    for text, message in (
        ("data=2,fsdp:4", 'fsdp:4" in the mesh'),
        ("fsdp=2,fsdp=2", "fsdp=2"),
        ("fsdp=0", "fsdp is 0"),
    ):
        with pytest.raises(UserError, match=message):
            parse_mesh(text)
