"""Training on prepared corpora."""

import dataclasses
from itertools import islice

import pytest

from ldm_jax.config import DataConfig
from ldm_jax.data import Data, load_data
from ldm_jax.data.preparation import PrepareOptions, prepare
from ldm_jax.errors import UserError
from ldm_jax.infer import make_evaluate
from ldm_jax.nn import model_graph
from ldm_jax.train.metrics import read_metrics
from runs import assert_same_bits, make_corpus, quietly, tiny, without_memory


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run on a mixture."""
    home = tmp_path_factory.mktemp("prepared")
    options = PrepareOptions(
        (str(make_corpus(home / "text")),), tokenizer="bpe", vocabulary=300, document_bytes=100, validation_fraction=0.2
    )
    prepare(options, home / "a")
    prepare(dataclasses.replace(options, document_bytes=150, tokenizer=str(home / "a" / "tokenizer.json")), home / "b")
    config = without_memory(tiny("unused"))
    data = DataConfig(corpora=(str(home / "a"), str(home / "b")), weights=(2.0, 1.0), context=16)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=304), data=data)


def test_a_resumed_run_ends_with_the_same_bits(config, tmp_path, monkeypatch):
    whole, output = quietly(config, tmp_path / "whole")
    assert "bytes a token; 67% a, 33% b" in output
    batches = Data.batches
    with monkeypatch.context() as patch:
        patch.setattr(Data, "batches", lambda *arguments: islice(batches(*arguments), 3))
        with pytest.raises(StopIteration):
            quietly(config, tmp_path / "broken")
    resumed, output = quietly(config, tmp_path / "broken")
    assert "resuming from step 2" in output
    assert_same_bits(whole.params, resumed.params)


def test_bits_per_byte(config, tmp_path):
    state, _ = quietly(config, tmp_path / "run")
    row = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "validation_loss" in row][-1]
    data = load_data(config.data, 304)
    graph, end = model_graph(config.model, config.mixer), data.tokenizer.end_of_document
    evaluate = make_evaluate(graph, config.train.batch_size, data.bytes_per_token, end)
    expected = evaluate(state.eval_params, data.validation_windows(config.train.validation_windows))
    assert row["validation_loss"] == pytest.approx(expected.loss)
    assert row["validation_bits_per_byte"] == pytest.approx(expected.bits_per_byte)
    assert data.bytes_per_token > 1.2


def test_a_model_with_too_few_tokens_is_refused(config, tmp_path):
    few = dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary=256))
    with pytest.raises(UserError, match=r"model\.vocabulary is 256, but the tokenizer of the data has 300 tokens"):
        quietly(few, tmp_path / "run")
    assert not (tmp_path / "run").exists()
