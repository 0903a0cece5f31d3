"""Exported models have the same bits and functions, or are refused before anything is written."""

import contextlib
import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ldm_jax.config import AttentionBias, AttentionImplementation, Config, DataConfig, ModelConfig, TrainConfig
from ldm_jax.config.toml import config_to_toml
from ldm_jax.convert import Format, StoredType, export, import_hf
from ldm_jax.convert.hf_config import write_hf_config
from ldm_jax.convert.weights import exact_type, own_layout
from ldm_jax.data import ByteTokenizer, load_data, read_tokenizer, tokenizer_files
from ldm_jax.errors import UserError
from ldm_jax.infer import load_model
from ldm_jax.mixers import LDMConfig, MixerConfig, MixerKind
from ldm_jax.nn import init_params
from ldm_jax.runs.checkpoints import Checkpoints, Progress
from ldm_jax.runs.run_directory import RunDirectory
from ldm_jax.runs.state import TrainState
from ldm_jax.train.start import start
from random_params import random_params
from test_import import CASES, NAMES, TOLERANCE, change_config, loaded, tokenizer_file

MODEL = ModelConfig(depth=2, width=12, heads=2, mlp_width=16)
PRELN = MixerConfig(MixerKind.PRELN)
LDM = MixerConfig(ldm=LDMConfig(groups=2, key_dim=2, latent_dim=4))


def write_run(path, config, tokenizer=None, size=1.0):
    """A run at step 3 with random parameters."""
    (path / "checkpoints").mkdir(parents=True)
    text = config_to_toml(config)
    RunDirectory(path).store(text)
    params = random_params(jax.eval_shape(lambda: init_params(config.model, config.mixer, 0)))
    params["norm"]["scale"] *= size
    progress = Progress(0, 0.0, "a corpus", text, tokenizer_files(tokenizer or ByteTokenizer()))
    with contextlib.closing(Checkpoints(path / "checkpoints", keep=1)) as checkpoints:
        state = TrainState.imported(params)._replace(step=jax.numpy.int32(3))
        assert (checkpoints.save(3, state, progress) or checkpoints.wait()) is None
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    for index in range(20):
        (directory / f"{index}.txt").write_text(f"{index} " * 99)
    return DataConfig(path=f"{directory}/*.txt", context=16, validation_fraction=0.2)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A run with PreLN, and one with a memory."""
    directory = tmp_path_factory.mktemp("runs")
    return {
        mixer.kind: write_run(directory / mixer.kind, Config(MODEL, mixer, corpus), ByteTokenizer())
        for mixer in (PRELN, LDM)
    }


@pytest.fixture(scope="module")
def large(corpus, tmp_path_factory):
    """A run with a tokenizer, and with a parameter that float16 does not hold."""
    directory = tmp_path_factory.mktemp("large")
    tokenizer_file(directory, "<end>", start=True)
    tokenizer = read_tokenizer(directory / "tokenizer.json", "<end>")
    return write_run(directory / "run", Config(MODEL, PRELN, corpus), tokenizer, size=1e5)


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    """The exported model with a memory."""
    export(runs["ldm"], out := tmp_path_factory.mktemp("exported") / "ldm")
    return out


def tensors_of(directory):
    """The tensors of all files as bits; NumPy knows bfloat16 only through JAX."""
    return {
        name: (str(array.dtype), array.shape, array.tobytes())
        for file in directory.glob("*.safetensors")
        for name, array in load_file(file).items()
    }


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", ["llama3_rope_bf16", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES)])
def test_an_imported_model_is_exported_with_the_same_bits(tmp_path, name):
    run, out = tmp_path / "run", tmp_path / "out"
    model = import_hf(CASES / name, run).model
    assert export(run, out, shard_bytes=20_000).step == 0
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert tensors_of(out) == tensors_of(CASES / name)
    again = load_model(out)
    assert again.config.model == model
    assert_same_bits(again.params, loaded(name)[1])


def test_a_scaled_embedding_is_exported_as_it_is_computed(runs, tmp_path):
    exported = export(runs["preln"], tmp_path / "out")
    assert exported == ("Qwen3ForCausalLM", 3, StoredType.FLOAT32, True)
    run, model = load_model(runs["preln"]), load_model(tmp_path / "out")
    tokens = jax.numpy.arange(16).reshape(2, 8)
    logits, expected = np.asarray(model.logits(tokens)), np.asarray(run.logits(tokens))
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()
    assert model.tokenizer.fingerprint == "bytes"
    assert model.config.data.context == 16
    table, head = run.params["embed"]["embedding"], model.params["head"]["kernel"]
    np.testing.assert_array_equal(head, table.T)
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode == (tmp_path / "out" / "config.json").stat().st_mode


def test_a_run_starts_from_an_exported_model(runs, corpus, tmp_path):
    run = load_model(runs["preln"])
    export(runs["preln"], tmp_path / "small", format=Format.LDM_JAX, dtype=StoredType.BFLOAT16)
    small = load_model(tmp_path / "small")
    assert small.config == run.config
    assert_same_bits(small.params, jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), run.params))
    config = dataclasses.replace(run.config, train=TrainConfig(init=str(tmp_path / "small"), batch_size=4))
    state, lines = start(config, load_data(corpus, 256), None)
    assert_same_bits(state.params, small.params)
    assert f"{tmp_path}/small, step 3" in lines[0]


def test_a_model_with_a_memory_is_exported_whole(runs, exported, tmp_path):
    run, model = load_model(runs["ldm"]), load_model(exported)
    assert_same_bits(model.params, run.params)
    assert (model.config, model.step, model.corpus, model.averaged) == (run.config, 3, "a corpus", False)
    assert model.tokenizer.fingerprint == "bytes"
    assert model.path == exported
    with safe_open(exported / "model.safetensors", "np") as file:
        assert file.metadata()["step"] == "3"
        assert "blocks.attention.norm.scale" in file.keys()  # noqa: SIM118
    assert [entry.name for entry in exported.parent.iterdir()] == ["ldm"]
    with pytest.raises(UserError, match=f"{exported} exists"):
        export(runs["ldm"], exported)
    export(exported, tmp_path / "again")
    assert tensors_of(tmp_path / "again") == tensors_of(exported)


@pytest.mark.parametrize(
    ("value", "kind"), [(-0.0, "bfloat16"), (np.inf, "bfloat16"), (np.nan, "bfloat16"), (0.1, "float32")]
)
def test_the_smallest_type_holds_all_bits(value, kind):
    layout = own_layout(MODEL, PRELN)
    shapes = jax.eval_shape(lambda: init_params(MODEL, PRELN, 0))
    assert exact_type(jax.tree.map(lambda leaf: np.full(leaf.shape, value, np.float32), shapes), layout) == kind
    signalling = np.uint32(0x7F800001).view(np.float32)  # conversions change these bits
    assert exact_type(jax.tree.map(lambda leaf: np.full(leaf.shape, signalling), shapes), layout) == "float32"


@pytest.mark.parametrize("format", Format)
def test_a_tokenizer_is_exported(tmp_path, large, format):
    out = tmp_path / "out"
    export(large, out, format=format)
    assert load_model(out).tokenizer.fingerprint == load_model(large).tokenizer.fingerprint
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<end>"
    assert json.loads((out / "tokenizer_config.json").read_text())["bos_token"] == "<end>"
    assert json.loads((out / "config.json").read_text()).get("bos_token_id") == (
        0 if format == "transformers" else None
    )
    again, run = load_model(out), load_model(large)
    assert (again.step, again.corpus, again.start) == (run.step, run.corpus, run.start)
    (out / "tokenizer.json").write_text((out / "tokenizer.json").read_text() + " ")
    with pytest.raises(UserError, match=r"out/tokenizer\.json"):
        load_model(out)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"attention_bias": AttentionBias.QKV}, r"attention_bias is qkv.*qk_norm"),
        ({"attention": AttentionImplementation.LOCAL}, r"attention is local"),
    ],
)
def test_what_transformers_does_not_have_is_refused(options, named):
    with pytest.raises(UserError, match=named):
        write_hf_config(dataclasses.replace(MODEL, scale_embedding=False, **options), 16, None, None)


def test_what_does_not_fit_is_refused_before_anything_is_written(runs, large, tmp_path):
    out = tmp_path / "new" / "out"
    with pytest.raises(UserError, match=r"mixer\.kind is ldm"):
        export(runs["ldm"], out, format=Format.TRANSFORMERS)
    assert not out.parent.exists()
    with pytest.raises(UserError, match=r"model\.norm\.weight .* float16"):
        export(large, out, dtype=StoredType.FLOAT16)
    assert not list(out.parent.iterdir())


def without(name):
    return lambda tensors: {each: array for each, array in tensors.items() if each != name}


DAMAGED = {
    "missing": (without("norm.scale"), {}, r"lacks norm\.scale"),
    "left over": (lambda tensors: tensors | {"other": np.ones(2, np.float32)}, {}, "has other"),
    "shape": (lambda tensors: tensors | {"norm.scale": np.ones(2, np.float32)}, {}, r"norm\.scale.*\(2,\).*\(12,\)"),
    "no step": (None, {"step": ...}, r"config\.json.*step"),
    "no config": (None, {"config": []}, r"config\.json.*config"),
    "unknown": (None, {"config": {"model": {"widht": 3}}}, r"config\.json.*widht.*width"),
    "model": (None, {"config": {"model": {"norm_eps": 0.1}}}, r"config\.json.*model\.\w+ was"),
    "tokenizer": (None, {"tokenizer": "other"}, "tokenizer in"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_an_exported_model_that_was_changed_is_refused(exported, tmp_path, name):
    change, keys, named = DAMAGED[name]
    directory = tmp_path / "changed"
    shutil.copytree(exported, directory)
    if change is not None:
        save_file(change(load_file(directory / "model.safetensors")), directory / "model.safetensors")
    change_config(directory, **keys)
    with pytest.raises(UserError, match=named) as refusal:
        load_model(directory)
    assert "\n" not in str(refusal.value)
    assert str(directory) in str(refusal.value)


FOR_TRANSFORMERS = {
    "tied": {},
    "untied": {"tied": False, "kv_heads": 1},
    "llama": {"qk_norm": False, "scale_embedding": False, "head_dim": 4, "norm_eps": 1e-3},
    "llama biases": {"qk_norm": False, "attention_bias": AttentionBias.ALL, "rope_scaling": (8.0, 1.0, 4.0, 8.0)},
    "qwen2": {"qk_norm": False, "attention_bias": AttentionBias.QKV, "head_dim": 4, "rope_base": 500.0},
    "qwen3 biases": {"attention_bias": AttentionBias.ALL, "head_dim": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOR_TRANSFORMERS)
def test_transformers_computes_the_same_logits(tmp_path, name, corpus):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    os.environ["HF_HUB_OFFLINE"] = "1"
    tokenizer_file(tmp_path)
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    config = Config(dataclasses.replace(MODEL, vocabulary=300, **FOR_TRANSFORMERS[name]), PRELN, corpus)
    run, out = write_run(tmp_path / "run", config, tokenizer), tmp_path / "out"
    export(run, out)
    tokens = np.random.default_rng(0).integers(300, size=(2, 16))
    expected = np.asarray(load_model(run).logits(jax.numpy.asarray(tokens)))
    model, found = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(found.values())
    assert model.generation_config.eos_token_id == 0
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    assert loaded("a b")["input_ids"] == tokenizer.encode("a b").tolist()
    assert loaded.eos_token_id == 0
