"""Training: what a run leaves, how it goes on, what it refuses, what it keeps when something breaks."""

import dataclasses
import json
import math
import shutil

import jax
import jax.numpy as jnp
import pytest

from ldm_jax.config import AttentionImplementation, ComputeType
from ldm_jax.config_file import config_to_toml, read_config
from ldm_jax.data import Data
from ldm_jax.errors import UserError
from ldm_jax.mixers import MixerConfig, MixerKind
from ldm_jax.train import load_run, loop
from ldm_jax.train.metrics import MetricsFile, read_metrics
from runs import assert_same_bits, make_corpus, quietly, tiny, with_train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture(scope="module")
def unbroken(corpus, tmp_path_factory):
    """Config, folder, final state and output of a whole run."""
    config, path = tiny(corpus), tmp_path_factory.mktemp("runs") / "unbroken"
    return config, path, *quietly(config, path)


def losses(path):
    return {row["step"]: row["loss"] for row in read_metrics(path / "metrics.jsonl") if "loss" in row}


def break_after(monkeypatch, batches, error=KeyboardInterrupt):
    """The next run is cut off when it asks for one batch more."""
    whole = Data.batches

    def cut(*arguments, **options):
        iterator = whole(*arguments, **options)
        for _ in range(batches):
            yield next(iterator)
        raise error

    monkeypatch.setattr(Data, "batches", cut)


def run_and_stop(config, path, batches):
    with pytest.MonkeyPatch.context() as patch:
        break_after(patch, batches)
        with pytest.raises(KeyboardInterrupt):
            quietly(config, path)


def test_what_a_run_leaves(unbroken):
    config, path, state, output = unbroken
    assert int(state.step) == 6
    assert read_config(path / "config.toml") == config
    rows = read_metrics(path / "metrics.jsonl")
    training = [row for row in rows if "loss" in row]
    validation = [row for row in rows if "loss" not in row]
    assert [row["step"] for row in training] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in validation] == [3, 6]
    names = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "seconds"}
    assert all(set(row) == names for row in training)
    assert training[-1]["tokens"] == 6 * 4 * 16
    assert all(set(row) == {"step", "validation_loss", "validation_bits_per_byte"} for row in validation)
    row = validation[-1]
    assert row["validation_bits_per_byte"] == pytest.approx(row["validation_loss"] / math.log(2))
    assert sorted(folder.name for folder in (path / "checkpoints").iterdir()) == ["4", "6"]  # the latest two
    sample = (path / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert sample in output
    for words in ("depth = 2", "mixer", "tokens to see", "cpu", "step 6/6"):
        assert words in output


def test_a_stopped_run_ends_with_the_bits_of_an_unbroken_one(unbroken, tmp_path):
    config, whole, expected, _ = unbroken
    path = tmp_path / "broken"
    for batches in (3, 2):  # stops in step 4, resumes from 2, stops in step 5, resumes from 4
        run_and_stop(config, path, batches)
    state, output = quietly(config, path)
    assert "goes on from step 4" in output
    assert_same_bits(state, expected)
    assert losses(path) == losses(whole)
    steps = [(row["step"], "loss" in row) for row in read_metrics(path / "metrics.jsonl")]
    assert len(steps) == len(set(steps))


def test_more_steps_continue_a_finished_run(unbroken, corpus, tmp_path):
    config = tiny(corpus, steps=4, schedule=unbroken[0].train.schedule)
    path = tmp_path / "run"
    quietly(config, path)
    _, output = quietly(config, path)
    assert "is finished at step 4; a higher train.steps continues it" in output
    state, output = quietly(with_train(config, steps=6), path)
    assert "train.steps was 4 and is now 6" in output
    assert int(state.step) == 6
    assert list(losses(path)) == [1, 2, 3, 4, 5, 6]
    assert read_config(path / "config.toml").train.steps == 6
    _, output = quietly(config, path)  # fewer steps than there are: nothing to do, nothing changes
    assert "is finished at step 6" in output
    assert read_config(path / "config.toml").train.steps == 6


def test_another_model_is_refused_and_nothing_is_touched(unbroken):
    config, path, state, _ = unbroken
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    other = dataclasses.replace(config, mixer=MixerConfig(MixerKind.PRELN, config.mixer.ldm))
    with pytest.raises(UserError, match=r"holds another model: mixer\.kind was ldm and is now preln"):
        quietly(other, path)
    with pytest.raises(UserError, match=r"train\.seed was 0 and is now 1"):
        quietly(with_train(config, seed=1), path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert_same_bits(load_run(path).params, state.params)


def test_a_folder_of_other_files_is_refused(corpus, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds other files \(thesis\.tex\)"):
        quietly(tiny(corpus), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        quietly(tiny(corpus), tmp_path / "thesis.tex" / "run")


def test_cudnn_without_a_gpu_is_refused(corpus, tmp_path):
    config = tiny(corpus)
    model = dataclasses.replace(
        config.model, attention=AttentionImplementation.CUDNN, compute_dtype=ComputeType.BFLOAT16
    )
    with pytest.raises(UserError, match=r"cuDNN needs an NVIDIA GPU\. Set model\.attention to xla"):
        quietly(dataclasses.replace(config, model=model), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_runs_in_one_folder_are_refused(corpus, tmp_path):
    directory = loop.RunDirectory(tmp_path / "run")
    directory.open(tiny(corpus))
    with pytest.raises(UserError, match="another process is training"):
        quietly(tiny(corpus), tmp_path / "run")
    directory.close()


def test_a_loss_that_is_not_finite_stops_the_run(corpus, tmp_path, monkeypatch):
    whole = loop.make_train_step

    def spoiled(config):
        step = whole(config)

        def spoil(state, batch):
            bad = int(state.step) == 4
            state, metrics = step(state, batch)
            return state, metrics._replace(loss=metrics.loss * jnp.where(bad, jnp.nan, 1.0))

        return spoil

    monkeypatch.setattr(loop, "make_train_step", spoiled)
    with pytest.raises(UserError, match=r"step 5: the loss is nan .* The checkpoint of step 4 is kept"):
        quietly(tiny(corpus), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.step == 4
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(run.params))
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]


def test_a_full_disk_is_seen_before_it_is_written_to(corpus, tmp_path, monkeypatch):
    config, path = tiny(corpus), tmp_path / "run"
    run_and_stop(config, path, 5)
    usage = shutil.disk_usage(path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    words = r"step 6 could not be written .* the disk has 1\.0 MB left\. The one of step 4 is kept\. Free some space"
    with pytest.raises(UserError, match=words):
        quietly(config, path)
    monkeypatch.undo()
    assert load_run(path).step == 4
    assert int(quietly(config, path)[0].step) == 6


def test_a_torn_line_of_metrics_is_left_out(unbroken, tmp_path):
    config = unbroken[0]
    path = tmp_path / "run"
    run_and_stop(config, path, 3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    quietly(config, path)
    assert losses(path) == losses(unbroken[1])
    assert all(json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize("line", ["{garb", "5", '{"loss": 1}', "\udcff"])
def test_a_wrong_line_of_metrics_loses_nothing(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n', errors="surrogateescape")
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl is no row"):
        MetricsFile(path, 1, 1)
    assert path.read_bytes() == before


def test_rows_without_their_checkpoints_are_not_thrown_away(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n{"step": 20}\n')
    with pytest.raises(UserError, match=r"rows up to step 20, but the run's checkpoints are gone"):
        MetricsFile(path, 0, 10)
    MetricsFile(path, 0, 25).close()  # killed before its first checkpoint: the run starts anew
    assert path.read_text() == ""


def test_a_ruinous_update_is_not_saved(corpus, tmp_path, monkeypatch):
    # The losses of the first four steps are finite, and so are the numbers that the fourth update leaves.
    whole = loop.make_train_step

    def ruinous(config):
        step = whole(config)

        def ruin(state, batch):
            last = int(state.step) == 3
            state, metrics = step(state, batch)
            factor = 1e30 if last else 1.0
            return state._replace(params=jax.tree.map(lambda x: x * factor, state.params)), metrics

        return ruin

    monkeypatch.setattr(loop, "make_train_step", ruinous)
    with pytest.raises(UserError, match=r"step 4: the update has made the loss .* The checkpoint of step 2 is kept"):
        quietly(tiny(corpus), tmp_path / "run")
    assert load_run(tmp_path / "run").step == 2


def test_a_users_config_is_not_overwritten(corpus, tmp_path):
    config = tiny(corpus)
    (tmp_path / "config.toml").write_text("# mine\n" + config_to_toml(config))
    with pytest.raises(UserError, match=r"holds other files \(config\.toml\)"):
        quietly(config, tmp_path)
    assert (tmp_path / "config.toml").read_text().startswith("# mine")


def test_what_is_no_run_is_not_loaded(tmp_path, corpus):
    with pytest.raises(UserError, match="holds no run"):
        load_run(tmp_path / "nothing")
    run_and_stop(tiny(corpus), tmp_path / "run", 1)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        load_run(tmp_path / "run")


def test_a_changed_corpus_is_told(unbroken, tmp_path):
    corpus = make_corpus(tmp_path / "corpus")
    config, path = tiny(corpus), tmp_path / "run"
    run_and_stop(config, path, 3)
    (tmp_path / "corpus" / "new.txt").write_text("more text\n" * 20)
    _, output = quietly(config, path)
    assert "the corpus is not the one that the run was started on" in output
