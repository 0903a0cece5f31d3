"""Training runs: what they write, how they resume, what they refuse, and what survives failures."""

import contextlib
import dataclasses
import json
import math
import resource
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.config import AttentionImplementation, ComputeType
from ldm_jax.config.toml import config_to_toml, read_config
from ldm_jax.data import Data
from ldm_jax.errors import DivergedError, UserError
from ldm_jax.infer import MemoryFigures, load_model
from ldm_jax.runs.checkpoints import Checkpoints
from ldm_jax.runs.run_directory import RunDirectory
from ldm_jax.train import loop, make_state
from ldm_jax.train.metrics import MetricsFile, read_metrics
from runs import assert_same_bits, make_corpus, quietly, tiny, with_optimizer, with_train, without_memory

TRAINING_ROW = {
    "step", "loss", "grad_norm", "grad_norm_embedding", "grad_norm_blocks", "update_ratio",
    "learning_rate", "skipped_updates", "tokens", "tokens_per_second", "seconds", "model_flops_per_second",
}  # fmt: skip


def checkpoint_names(path):
    return sorted(directory.name for directory in (path / "checkpoints").glob("[0-9]*"))


def losses(path):
    return {row["step"]: row["loss"] for row in read_metrics(path / "metrics.jsonl") if "loss" in row}


def change_batches(monkeypatch, change):
    """Every later run trains on `change(number, batch)`, with numbers counted from 1 in each run."""
    original = Data.batches

    def changed(self, *arguments, **options):
        for number, batch in enumerate(original(self, *arguments, **options), 1):
            yield change(number, batch)

    monkeypatch.setattr(Data, "batches", changed)


def interrupt_after(monkeypatch, batches, error=KeyboardInterrupt):
    """The next run is interrupted when it requests one batch more."""

    def change(number, batch):
        if number > batches:
            raise error
        return batch

    change_batches(monkeypatch, change)


def not_finite(batch):
    """The same batch with a token outside of the vocabulary, whose embedding is NaN."""
    return batch._replace(tokens=np.where(batch.tokens == batch.tokens[0, 0], 999, batch.tokens))


def run_and_interrupt(config, path, batches):
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, batches)
        with pytest.raises(KeyboardInterrupt):
            quietly(config, path)


def test_what_a_run_writes(finished):
    config, path, state, output = finished
    assert int(state.step) == 6
    assert read_config(path / "config.toml") == config
    rows = read_metrics(path / "metrics.jsonl")
    training = [row for row in rows if "loss" in row]
    validation = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in training] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in validation] == [3, 6]
    assert all(row.keys() == TRAINING_ROW for row in training[1:])
    assert TRAINING_ROW - training[0].keys() == {
        "tokens_per_second",
        "model_flops_per_second",
    }  # compilation
    for row in training:
        parts = [row[f"grad_norm_{part}"] for part in ("embedding", "blocks")]
        assert math.hypot(*parts) == pytest.approx(row["grad_norm"], rel=1e-5)
        assert 0 < row["update_ratio"] < 1
    assert training[-1]["tokens"] == 6 * 4 * 16
    assert all(set(row) == {"step", "tokens", "validation_loss", "validation_bits_per_byte"} for row in validation)
    assert checkpoint_names(path) == ["4", "6"]  # the latest two
    sample = (path / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert sample in output
    for words in ("depth 2", "kind preln", "6 steps (2 of warm-up), 384 tokens", "cpu", "compiled", "step 6/6"):
        assert words in output


def test_what_a_depth_memory_adds_to_the_metrics(corpus, tmp_path):
    quietly(tiny(corpus, steps=3), tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {"grad_norm_mixer"} == set(rows[1]) - TRAINING_ROW
    (figures,) = (row for row in rows if "gate" in row)
    assert figures.keys() == {"step", *MemoryFigures._fields}
    assert figures["step"] == 3
    assert all(np.shape(figures[name]) == (4, 2) for name in MemoryFigures._fields)  # sublayers, groups


def test_an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one(finished, tmp_path):
    config, whole, expected, _ = finished
    path = tmp_path / "broken"
    for batches in (3, 2):  # interrupted in step 4, resumed from 2, interrupted in step 5, resumed from 4
        run_and_interrupt(config, path, batches)
    state, output = quietly(config, path)
    assert "resuming from step 4" in output
    assert_same_bits(state, expected)
    assert losses(path) == losses(whole)
    steps = [(row["step"], *sorted(row)) for row in read_metrics(path / "metrics.jsonl")]
    assert len(steps) == len(set(steps))


def test_more_steps_continue_a_finished_run(finished, corpus, tmp_path):
    config = without_memory(tiny(corpus, steps=4))
    path = tmp_path / "run"
    quietly(config, path)
    _, output = quietly(config, path)
    assert "is finished at step 4" in output
    state, output = quietly(with_train(config, steps=6), path)
    assert "train.steps was 4 and is now 6" in output
    assert int(state.step) == 6
    assert list(losses(path)) == [1, 2, 3, 4, 5, 6]
    assert read_config(path / "config.toml").train.steps == 6
    _, output = quietly(config, path)  # fewer steps than the run has: nothing changes
    assert "is finished at step 6" in output
    assert read_config(path / "config.toml").train.steps == 6


def test_a_directory_of_other_files_is_refused(corpus, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        quietly(tiny(corpus), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        quietly(tiny(corpus), tmp_path / "thesis.tex" / "run")


def test_cudnn_without_a_gpu_is_refused(corpus, tmp_path):
    config = tiny(corpus)
    model = dataclasses.replace(
        config.model, attention=AttentionImplementation.CUDNN, compute_dtype=ComputeType.BFLOAT16
    )
    with pytest.raises(UserError, match=r"model\.attention is cudnn"):
        quietly(dataclasses.replace(config, model=model), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_processes_in_one_directory_are_refused(corpus, tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.open()
    with pytest.raises(UserError, match="another process is training"):
        quietly(tiny(corpus), tmp_path / "run")
    directory.close()


def test_an_update_that_is_not_finite_is_skipped(corpus, tmp_path, monkeypatch):
    config = without_memory(tiny(corpus))
    change_batches(monkeypatch, lambda number, batch: not_finite(batch) if number == 3 else batch)
    state, output = quietly(config, tmp_path / "run")
    assert "step 3: update skipped (loss nan, gradient norm nan); 1 in a row, 1 in total" in output
    assert (int(state.step), int(state.skips.total), int(state.skips.in_a_row)) == (6, 1, 0)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state))
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "update_ratio" in row]
    assert [row["skipped_updates"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert "loss" not in rows[2]
    assert rows[2]["update_ratio"] == 0


def test_many_skipped_updates_stop_the_run(corpus, tmp_path, monkeypatch):
    config = without_memory(tiny(corpus, skips_in_a_row=2))
    change_batches(monkeypatch, lambda number, batch: not_finite(batch) if number >= 5 else batch)
    with pytest.raises(DivergedError, match=r"step 6: the last 2 updates were skipped .* checkpoint of step 4 is kept"):
        quietly(config, tmp_path / "run")
    run = load_model(tmp_path / "run")
    assert run.step == 4
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(run.params))


def test_training_continues_when_the_disk_is_full(corpus, tmp_path, monkeypatch):
    config, path = without_memory(tiny(corpus)), tmp_path / "run"
    usage = shutil.disk_usage(tmp_path)
    answers = iter([usage, usage._replace(free=1_000_000), usage])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: next(answers))
    _, output = quietly(config, path)
    assert "warning: the checkpoint of step 4 could not be written" in output
    assert "the disk has only 1.0 MB left. The checkpoint of step 2 is kept." in output
    assert checkpoint_names(path) == ["2", "6"]
    assert load_model(path).step == 6


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(corpus, tmp_path, monkeypatch):
    config, path = without_memory(tiny(corpus, steps=2)), tmp_path / "run"
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"the checkpoint of step 2 could not be written .* no earlier one"):
        quietly(config, path)
    monkeypatch.undo()
    assert int(quietly(config, path)[0].step) == 2


@contextlib.contextmanager
def file_size_limit(size):
    """Writes past the limit fail, in part or whole, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_rows_that_do_not_fit_on_the_disk_are_written_later(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    with file_size_limit(7):
        failure = file.write({"step": 1})
    assert "File too large" in failure
    assert path.read_text() == '{"step"'
    assert read_metrics(path) == []
    assert file.write({"step": 2}) is None
    file.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_corrupt_checkpoint_is_skipped(finished, tmp_path, damage):
    config, whole, expected, _ = finished
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    largest = max((path / "checkpoints" / "6").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    assert load_model(path).step == 4
    assert checkpoint_names(path) == ["4", "6"]  # loading a run changes nothing
    state, output = quietly(config, path)
    assert "warning     the checkpoint of step 6 in" in output
    assert "resuming from step 4" in output
    assert_same_bits(state, expected)
    assert checkpoint_names(path) == ["4", "6", "6.corrupt"]


def test_checkpoints_in_a_separate_directory(finished, tmp_path):
    # As in a bucket: the run resumes even if its own directory is lost with a machine's disk.
    config, _, state, _ = finished
    options = dataclasses.replace(config.train, checkpoints=str(tmp_path / "kept"))
    config = dataclasses.replace(config, train=options)
    run_and_interrupt(config, tmp_path / "run", config.train.checkpoint_every + 1)
    assert not (tmp_path / "run" / "checkpoints").exists()
    shutil.rmtree(tmp_path / "run")
    found, output = quietly(config, tmp_path / "run")
    assert "resuming from step" in output
    assert_same_bits(found, state)
    assert load_model(tmp_path / "run").step == config.train.steps


def test_a_run_whose_checkpoints_are_all_corrupt_is_not_restarted(finished, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(finished[1], path)
    for step in (4, 6):
        shutil.rmtree(path / "checkpoints" / str(step) / "state")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read: the checkpoint of step 6"):
        quietly(finished[0], path)


def test_a_signal_saves_and_stops_the_run(finished, tmp_path, monkeypatch):
    config, whole, expected, _ = finished
    path = tmp_path / "run"

    def interrupt(number, batch):
        if number == 3:
            signal.raise_signal(signal.SIGTERM)
        return batch

    with pytest.MonkeyPatch.context() as patch:
        change_batches(patch, interrupt)
        state, output = quietly(config, path)
    assert int(state.step) == 3
    assert "stopped by SIGTERM after step 3" in output
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    state, _ = quietly(config, path)
    assert_same_bits(state, expected)
    assert losses(path) == losses(whole)


def test_another_batch_size_continues_at_the_same_position(corpus, tmp_path):
    config, path = without_memory(tiny(corpus, steps=2)), tmp_path / "run"
    quietly(config, path)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        original = Data.batches
        patch.setattr(
            Data, "batches", lambda self, *args, **options: seen.append(args) or original(self, *args, **options)
        )
        _, output = quietly(with_train(config, steps=4, batch_size=2), path)
    assert seen == [(8, 2, 0)]  # two batches of four windows were consumed
    assert "train.batch_size was 4 and is now 2" in output
    rows = [row for row in read_metrics(path / "metrics.jsonl") if "loss" in row]
    assert [row["tokens"] for row in rows] == [4 * 16, 8 * 16, 10 * 16, 12 * 16]


def test_checkpoints_that_are_kept_permanently(corpus, tmp_path):
    config = without_memory(tiny(corpus, checkpoint_every=1, keep_checkpoints=1, keep_every=2))
    quietly(config, tmp_path / "run")
    assert checkpoint_names(tmp_path / "run") == ["2", "4", "6"]


def test_the_moving_average_is_evaluated(corpus, tmp_path):
    config = with_optimizer(without_memory(tiny(corpus)), ema=0.9)
    state, _ = quietly(config, tmp_path / "run")
    run = load_model(tmp_path / "run")
    assert_same_bits(run.params, state.average)
    assert any(bool((a != b).any()) for a, b in zip(*map(jax.tree.leaves, (state.average, state.params)), strict=True))
    with pytest.raises(UserError, match=r"optimizer\.ema > 0 was True and is now False"):
        quietly(with_optimizer(config, ema=0.0), tmp_path / "run")


def test_an_incomplete_line_of_metrics_is_dropped(finished, tmp_path):
    config = finished[0]
    path = tmp_path / "run"
    run_and_interrupt(config, path, 3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    quietly(config, path)
    assert losses(path) == losses(finished[1])
    assert all(json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines())


def test_a_changed_checkpoint_is_corrupt(finished, tmp_path):
    config, whole, expected, _ = finished
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    (path / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()
    file = path / "checkpoints" / "6" / "progress" / "metadata"
    assert '"windows": 24' in file.read_text()
    file.write_text(file.read_text().replace('"windows": 24', '"windows": 20'))
    state, output = quietly(config, path)
    assert "step 6 in" in output
    assert "is corrupt: its content does not match its fingerprint." in output
    assert_same_bits(state, expected)
    assert checkpoint_names(path) == ["4", "6", "6.corrupt"]
    (path / "checkpoints" / "7.corrupt").mkdir()
    (path / "checkpoints" / "8.corrupt").mkdir()  # from earlier
    (path / "checkpoints" / "4").rename(path / "checkpoints" / "8")
    _, output = quietly(config, path)
    assert "step 8 in" in output
    assert "is corrupt: it holds the state of step 4." in output
    assert (path / "checkpoints" / "8.corrupt1").is_dir()


def test_parameters_without_a_finite_loss_are_not_saved(corpus, tmp_path, monkeypatch):
    # The losses of the first four steps are finite, and so are the parameters after the fourth.
    original = loop.make_train_step

    def ruinous(config, mesh):
        step = original(config, mesh)

        def ruin(state, batch):
            last = int(state.step) == 3
            state, metrics = step(state, batch)
            factor = 1e30 if last else 1.0
            return state._replace(params=jax.tree.map(lambda x: x * factor, state.params)), metrics

        return ruin

    monkeypatch.setattr(loop, "make_train_step", ruinous)
    with pytest.raises(DivergedError, match=r"step 4: .* The checkpoint of step 2 is kept"):
        quietly(tiny(corpus), tmp_path / "run")
    assert load_model(tmp_path / "run").step == 2


def test_a_checkpoint_that_was_removed_meanwhile_is_not_corrupt(finished, tmp_path):
    config, whole, _, _ = finished
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    state, _, warnings = checkpoints.restore_latest(make_state(config))
    checkpoints.close()
    assert (int(state.step), warnings) == (4, [])


def test_a_users_config_is_not_overwritten(corpus, tmp_path):
    config = tiny(corpus)
    (tmp_path / "config.toml").write_text("# mine\n" + config_to_toml(config))
    with pytest.raises(UserError, match=r"config\.toml"):
        quietly(config, tmp_path)
    assert (tmp_path / "config.toml").read_text().startswith("# mine")


def test_directories_without_a_checkpoint_are_not_loaded(tmp_path, corpus):
    with pytest.raises(UserError, match="holds no run"):
        load_model(tmp_path / "nothing")
    run_and_interrupt(without_memory(tiny(corpus)), tmp_path / "run", 1)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        load_model(tmp_path / "run")


def test_a_changed_corpus_is_reported(finished, tmp_path):
    corpus = make_corpus(tmp_path / "corpus")
    config, path = without_memory(tiny(corpus)), tmp_path / "run"
    run_and_interrupt(config, path, 3)
    (tmp_path / "corpus" / "new.txt").write_text("more text\n" * 20)
    _, output = quietly(config, path)
    assert "the corpus has changed" in output
