"""Hugging Face checkpoints become runs with the same logits, or are refused before anything is written."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file, save_file

from import_memory import measure
from ldm_jax.config import AttentionBias, ModelConfig, OptimizerName
from ldm_jax.convert import Weights, hf_layout, import_hf, load_params, read_hf_config
from ldm_jax.convert.weights import PRELN
from ldm_jax.data.preparation import PrepareOptions, prepare
from ldm_jax.errors import UserError
from ldm_jax.infer import load_model
from ldm_jax.nn import init_params, model_graph
from ldm_jax.nn.cache import init_cache
from ldm_jax.runs.checkpoints import Checkpoints
from ldm_jax.train import make_state, train

CASES = Path(__file__).parent / "cases"
NAMES = sorted(case.name for case in CASES.iterdir())
TOLERANCE = 2e-6
"""Relative to the largest logit. The recorded logits are float32 and differ by up to 1.6e-6 from those in float64."""


@functools.cache
def loaded(name):
    model = read_hf_config(CASES / name).model
    weights, layout = Weights(CASES / name), hf_layout(model)
    weights.check(layout)
    return model, load_params(weights, layout)


def assert_expected(name, logits):
    expected = np.load(CASES / name / "expected.npz")["logits"]
    assert np.abs(np.asarray(logits) - expected).max() <= TOLERANCE * np.abs(expected).max()


def ids(name):
    return jnp.asarray(np.load(CASES / name / "expected.npz")["ids"])


@functools.partial(jax.jit, static_argnames="model")
def logits(model, params, tokens):
    return nnx.merge(model_graph(model, PRELN), params)(tokens)


@functools.partial(jax.jit, static_argnames="model")
def logits_by_token(model, params, tokens):
    graph = model_graph(model, PRELN)

    def step(cache, token):
        transformer = nnx.merge(graph, params)
        hidden, cache = transformer.decode(token[:, None], cache)
        return cache, transformer.logits(hidden[:, 0])

    cache = init_cache(model, jnp.zeros(len(tokens), jnp.int32), tokens.shape[1])
    return jnp.moveaxis(jax.lax.scan(step, cache, tokens.T)[1], 0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    model, params = loaded(name)
    assert_expected(name, logits(model, params, ids(name)))


@pytest.mark.parametrize("name", ["qwen3_head_dim", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES)])
def test_logits_token_by_token_and_without_the_scan(name):
    model, params = loaded(name)
    assert_expected(name, logits_by_token(dataclasses.replace(model, scan=False), params, ids(name)))


def test_both_spellings_of_a_config_are_the_same(tmp_path):
    case = CASES / "llama3_rope_bf16"
    shutil.copy(case / "config_as_transformers_4_writes_it.json", tmp_path / "config.json")
    old, new = read_hf_config(tmp_path).model, read_hf_config(case).model
    assert old == new
    assert new.rope_scaling == (8, 1, 4, 64)
    assert read_hf_config(case, context=32).context == 32


def test_all_projections_can_have_a_bias():
    config = ModelConfig(depth=1, width=8, heads=2, mlp_width=8, vocabulary=8, attention_bias=AttentionBias.ALL)
    attention = jax.eval_shape(lambda: init_params(config, PRELN, 0))["blocks"]["attention"]["function"]
    assert [attention[name]["bias"].shape[1] for name in ("query", "key", "value", "out")] == [8, 8, 8, 8]


def tokenizer_file(directory, name="<|endoftext|>", start=False):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([name])
    if start:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(f"{name} $A", None, [(name, 0)])
    tokenizer.save(str(directory / "tokenizer.json"))


def test_an_imported_model_is_a_run(tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "runs" / "base"
    shutil.copytree(CASES / "llama3_rope_bf16", source)
    tokenizer_file(source)
    config = import_hf(source, out)
    run = load_model(out)
    assert (run.config, run.step, run.corpus) == (config, 0, "")
    assert run.tokenizer.end_of_document == 0
    assert config.data.context == 1024
    jax.tree.map(np.testing.assert_array_equal, run.params, loaded("llama3_rope_bf16")[1])
    assert [entry.name for entry in out.parent.iterdir()] == ["base"]
    with pytest.raises(UserError, match=f"{out} exists"):
        import_hf(source, out)
    # A new run's state, with the moving average, starts from the parameters.
    averaged = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, ema=0.9))
    checkpoints = Checkpoints(out / "checkpoints", keep=1)
    state, progress, _ = checkpoints.restore_latest(make_state(averaged))
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, state.average, run.params)
    assert progress.corpus == ""
    assert capsys.readouterr().err == ""


def test_a_model_without_a_tokenizer_takes_no_text(tmp_path):
    import_hf(CASES / "llama_tied_gqa", tmp_path / "run", context=16)
    run = load_model(tmp_path / "run")
    with pytest.raises(UserError, match="without a tokenizer"):
        run.tokenizer.encode("a")


def test_the_end_of_a_document_is_that_of_the_model_if_the_tokenizer_has_no_usual_one(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(CASES / "llama_tied_gqa", source)
    tokenizer_file(source, "<end>")
    with pytest.raises(UserError, match="<end>"):  # eos_token_id is 2, which is no special token
        import_hf(source, tmp_path / "run")
    change_config(source, eos_token_id=[0, 1])
    import_hf(source, tmp_path / "run")
    assert load_model(tmp_path / "run").tokenizer.end_of_document == 0


def change_config(directory, **changes):
    file = directory / "config.json"
    table = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in table.items() if value is not ...}))


REFUSED = {
    "architecture": ("llama_tied_gqa", {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    "activation": ("llama_tied_gqa", {"hidden_act": "gelu"}, "gelu"),
    "mlp bias": ("llama_tied_gqa", {"mlp_bias": True}, "mlp_bias"),
    "rope": ("llama_tied_gqa", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32}}, "yarn"),
    "two ropes": ("llama_tied_gqa", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    "old rope": ("llama_tied_gqa", {"rope_parameters": ..., "rope_scaling": {"type": "dynamic"}}, "dynamic"),
    "missing rope": ("llama_tied_gqa", {"rope_parameters": {"rope_type": "llama3"}}, "no factor"),
    "part of rope": ("llama_tied_gqa", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "window": ("mistral_sharded", {"sliding_window": 64}, "sliding_window is 64"),
    "default window": ("mistral_sharded", {"sliding_window": ..., "max_position_embeddings": 8192}, "4096"),
    "layer windows": ("qwen3_head_dim", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 9}, "is 9"),
    "layer types": ("qwen3_head_dim", {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
    "quantised": ("qwen2_bias", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    "width": ("llama_tied_gqa", {"intermediate_size": 40}, r"gate_proj.*48.*40"),
    "no width": ("llama_tied_gqa", {"hidden_size": ...}, "hidden_size"),
    "odd heads": ("qwen3_head_dim", {"head_dim": 7}, "head_dim is 7"),
    "left over": ("llama_tied_gqa", {"num_hidden_layers": 2}, r"model.layers.2.*more"),
    "missing": ("llama_tied_gqa", {"tie_word_embeddings": False}, "lm_head.weight"),
    "no context": ("llama_tied_gqa", {"max_position_embeddings": 0}, "max_position_embeddings"),
    "biases": ("llama_tied_gqa", {"attention_bias": True}, "o_proj.bias|q_proj.bias|k_proj.bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(tmp_path, name):
    case, changes, named = REFUSED[name]
    source, out = tmp_path / "source", tmp_path / "new" / "run"
    shutil.copytree(CASES / case, source)
    change_config(source, **changes)
    with pytest.raises(UserError, match=named) as refusal:
        import_hf(source, out)
    assert str(refusal.value).count("\n") == 0
    assert not out.parent.exists()


def test_damaged_and_other_weights_are_refused(tmp_path):
    source, out = tmp_path / "source", tmp_path / "run"
    shutil.copytree(CASES / "mistral_sharded", source)
    shard = source / "model-00003-of-00007.safetensors"
    tensors, other = load_file(shard), source / "model-00001-of-00007.safetensors"
    twice = next(iter(tensors))
    save_file(load_file(other) | {twice: tensors[twice] + 1}, other)
    with pytest.raises(UserError, match=f"{twice} is in two files"):
        import_hf(source, out)
    shutil.copy(CASES / "mistral_sharded" / other.name, other)
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(UserError, match=shard.name):
        import_hf(source, out)
    shard.unlink()
    with pytest.raises(UserError, match=shard.name):
        import_hf(source, out)
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors"):
        import_hf(source, out)
    file = CASES / "llama_tied_gqa" / "model.safetensors"
    shutil.copy(CASES / "llama_tied_gqa" / "config.json", source)
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": np.ones(32, np.int8)}, source / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight.*I8"):
        import_hf(source, out)
    # A tied model may store its head, and old checkpoints store the rotary frequencies.
    embedding, old = tensors["model.embed_tokens.weight"], "model.layers.0.self_attn.rotary_emb.inv_freq"
    eighth = {"model.embed_tokens.weight": embedding.astype(np.int8), "lm_head.weight": embedding.astype(np.int8)}
    save_file(tensors | eighth, source / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight.*I8"):
        import_hf(source, out)
    save_file(tensors | {"lm_head.weight": embedding + 1}, source / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        import_hf(source, out)
    assert not out.exists()
    save_file(tensors | {"lm_head.weight": embedding, old: np.ones(4, np.float32)}, source / "model.safetensors")
    Weights(source).check(hf_layout(read_hf_config(source).model))


@pytest.mark.slow
def test_training_continues_an_imported_model(tmp_path):
    source, out = tmp_path / "source", tmp_path / "run"
    shutil.copytree(CASES / "llama_tied_gqa", source)
    tokenizer_file(source)
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("a b " * (20 + number))
    config = import_hf(source, out)
    options = PrepareOptions(
        files=(str(tmp_path / "*.txt"),), tokenizer=str(source / "tokenizer.json"), validation_fraction=0.5
    )
    prepare(options, out / "corpus")
    # All but [model] and [mixer] may change before the first step.
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, context=16),
        train=dataclasses.replace(config.train, steps=1, seed=3, sample_prompt="a", sample_tokens=1),
        optimizer=dataclasses.replace(config.optimizer, name=OptimizerName.MUON, learning_rate=1e-9),
    )
    train(config, out)
    run = load_model(out)
    assert (run.config, run.step) == (config, 1)
    params = loaded("llama_tied_gqa")[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), run.params, params)
    with pytest.raises(UserError, match=r"data\.context was 16 and is now 8"):
        train(dataclasses.replace(config, data=dataclasses.replace(config.data, context=8)), out)


@pytest.mark.slow
def test_an_import_needs_the_memory_of_the_parameters():
    assert measure(5e8, "bfloat16") <= 1.15
