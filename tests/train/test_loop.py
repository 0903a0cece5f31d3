"""Training: what a run leaves, how it goes on, what it refuses, what it keeps when something breaks."""

import dataclasses
import importlib.util
import json
import math
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.config import AttentionImplementation, ComputeType, OptimizerName
from ldm_jax.config.toml import config_to_toml, read_config
from ldm_jax.data import Data
from ldm_jax.errors import UserError
from ldm_jax.infer import MemoryFigures
from ldm_jax.mixers import MixerConfig, MixerKind
from ldm_jax.train import load_run, loop, make_state
from ldm_jax.train.checkpoints import Checkpoints
from ldm_jax.train.metrics import MetricsFile, read_metrics
from ldm_jax.train.run_directory import RunDirectory
from runs import assert_same_bits, make_corpus, quietly, tiny, with_optimizer, with_train, without_memory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture(scope="module")
def unbroken(corpus, tmp_path_factory):
    """Config, folder, final state and output of a whole run."""
    config, path = without_memory(tiny(corpus)), tmp_path_factory.mktemp("runs") / "unbroken"
    return config, path, *quietly(config, path)


TRAINING_ROW = {
    "step", "loss", "grad_norm", "grad_norm_embedding", "grad_norm_blocks", "update_ratio",
    "learning_rate", "skipped_updates", "tokens", "tokens_per_second", "seconds", "model_flops_per_second",
}  # fmt: skip


def losses(path):
    return {row["step"]: row["loss"] for row in read_metrics(path / "metrics.jsonl") if "loss" in row}


def change_batches(monkeypatch, change):
    """What every later run is given: `change(number, batch)`, numbers counted from 1 in each run."""
    whole = Data.batches

    def changed(self, *arguments, **options):
        for number, batch in enumerate(whole(self, *arguments, **options), 1):
            yield change(number, batch)

    monkeypatch.setattr(Data, "batches", changed)


def break_after(monkeypatch, batches, error=KeyboardInterrupt):
    """The next run is cut off when it asks for one batch more."""

    def change(number, batch):
        if number > batches:
            raise error
        return batch

    change_batches(monkeypatch, change)


def not_finite(batch):
    """The same batch with a token past the vocabulary, which is looked up as not-a-number."""
    return batch._replace(tokens=np.where(batch.tokens == batch.tokens[0, 0], 999, batch.tokens))


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
    validation = [row for row in rows if "validation_loss" in row]
    assert [row["step"] for row in training] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in validation] == [3, 6]
    assert all(row.keys() == TRAINING_ROW for row in training[1:])
    assert TRAINING_ROW - training[0].keys() == {"tokens_per_second", "model_flops_per_second"}  # it was compiled
    for row in training:
        parts = [row[f"grad_norm_{part}"] for part in ("embedding", "blocks")]
        assert math.hypot(*parts) == pytest.approx(row["grad_norm"], rel=1e-5)
        assert 0 < row["update_ratio"] < 1
    assert training[-1]["tokens"] == 6 * 4 * 16
    assert all(set(row) == {"step", "tokens", "validation_loss", "validation_bits_per_byte"} for row in validation)
    row = validation[-1]
    assert row["validation_bits_per_byte"] == pytest.approx(row["validation_loss"] / math.log(2))
    assert sorted(folder.name for folder in (path / "checkpoints").iterdir()) == ["4", "6"]  # the latest two
    sample = (path / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert sample in output
    for words in ("depth = 2", "mixer", "tokens to see", "cpu", "step 6/6"):
        assert words in output


def test_what_a_depth_memory_leaves_beside(corpus, tmp_path):
    quietly(tiny(corpus, steps=3), tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {"grad_norm_mixer"} == set(rows[1]) - TRAINING_ROW
    (figures,) = (row for row in rows if "gate" in row)
    assert figures.keys() == {"step", *MemoryFigures._fields}
    assert figures["step"] == 3
    assert all(np.shape(figures[name]) == (4, 2) for name in MemoryFigures._fields)  # sublayers, groups


def test_a_stopped_run_ends_with_the_bits_of_an_unbroken_one(unbroken, tmp_path):
    config, whole, expected, _ = unbroken
    path = tmp_path / "broken"
    for batches in (3, 2):  # stops in step 4, resumes from 2, stops in step 5, resumes from 4
        run_and_stop(config, path, batches)
    state, output = quietly(config, path)
    assert "goes on from step 4" in output
    assert_same_bits(state, expected)
    assert losses(path) == losses(whole)
    steps = [(row["step"], *sorted(row)) for row in read_metrics(path / "metrics.jsonl")]
    assert len(steps) == len(set(steps))


def test_more_steps_continue_a_finished_run(unbroken, corpus, tmp_path):
    config = without_memory(tiny(corpus, steps=4))
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
    other = dataclasses.replace(config, mixer=MixerConfig(MixerKind.LDM, config.mixer.ldm))
    with pytest.raises(UserError, match=r"holds another model: mixer\.kind was preln and is now ldm"):
        quietly(other, path)
    with pytest.raises(UserError, match=r"train\.seed was 0 and is now 1"):
        quietly(with_train(config, seed=1), path)
    with pytest.raises(UserError, match=r"optimizer\.name was adamw and is now muon, which would need another state"):
        quietly(with_optimizer(config, name=OptimizerName.MUON), path)
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
    directory = RunDirectory(tmp_path / "run")
    directory.open(tiny(corpus))
    with pytest.raises(UserError, match="another process is training"):
        quietly(tiny(corpus), tmp_path / "run")
    directory.close()


def test_an_update_that_is_not_finite_is_skipped(corpus, tmp_path, monkeypatch):
    config = without_memory(tiny(corpus))
    change_batches(monkeypatch, lambda number, batch: not_finite(batch) if number == 3 else batch)
    state, output = quietly(config, tmp_path / "run")
    assert "step 3: update skipped (loss nan, gradient nan); 1 in a row, 1 in all" in output
    assert (int(state.step), int(state.skips.total), int(state.skips.in_a_row)) == (6, 1, 0)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state))
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "update_ratio" in row]
    assert [row["skipped_updates"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert "loss" not in rows[2]
    assert rows[2]["update_ratio"] == 0


def test_many_skipped_updates_stop_the_run(corpus, tmp_path, monkeypatch):
    config = without_memory(tiny(corpus, skips_in_a_row=2))
    change_batches(monkeypatch, lambda number, batch: not_finite(batch) if number >= 5 else batch)
    words = r"step 6: the last 2 updates were skipped .* so the run stops\. The checkpoint of step 4 is kept"
    with pytest.raises(UserError, match=words):
        quietly(config, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.step == 4
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(run.params))


def test_training_goes_on_when_the_disk_is_full(corpus, tmp_path, monkeypatch):
    config, path = without_memory(tiny(corpus)), tmp_path / "run"
    usage = shutil.disk_usage(tmp_path)
    answers = iter([usage, usage._replace(free=1_000_000), usage])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: next(answers))
    _, output = quietly(config, path)
    words = "the checkpoint of step 4 could not be written to"
    assert f"warning: {words}" in output
    assert "the disk has 1.0 MB left. The one of step 2 is kept. Training goes on." in output
    assert sorted(folder.name for folder in (path / "checkpoints").iterdir()) == ["2", "6"]
    assert load_run(path).step == 6


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(corpus, tmp_path, monkeypatch):
    config, path = without_memory(tiny(corpus, steps=2)), tmp_path / "run"
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"step 2 could not be written .* no earlier one\. Free some space and start"):
        quietly(config, path)
    monkeypatch.undo()
    assert int(quietly(config, path)[0].step) == 2


def test_rows_that_a_full_disk_did_not_take_come_later(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    whole, space = file._file, [7]

    class Full:
        def write(self, data):
            if not space[0]:
                raise OSError(28, "No space left on device")
            written = whole.write(data[: space[0]])
            space[0] -= written
            return written

        def close(self):
            whole.close()

    file._file = Full()
    assert "No space left on device. Its rows are kept until there is space" in file.write({"step": 1})
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    space[0] = 1000
    assert file.write({"step": 2}) is None
    file.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_checkpoint_is_passed_over(unbroken, tmp_path, damage):
    config, whole, expected, _ = unbroken
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    largest = max((path / "checkpoints" / "6").rglob("*"), key=lambda file: file.stat().st_size * file.is_file())
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    assert load_run(path).step == 4
    assert sorted(folder.name for folder in (path / "checkpoints").iterdir()) == [
        "4",
        "6",
    ]  # who only reads moves nothing
    state, output = quietly(config, path)
    assert "warning     the checkpoint of step 6 in" in output
    assert "goes on from step 4" in output
    assert_same_bits(state, expected)
    assert sorted(folder.name for folder in (path / "checkpoints").iterdir()) == ["4", "6", "6.damaged"]


def test_checkpoints_in_a_folder_of_their_own(unbroken, tmp_path):
    # As on a bucket; the run's folder, on the disk of a machine that is gone, is not needed to go on.
    config, _, state, _ = unbroken
    options = dataclasses.replace(config.train, checkpoints=str(tmp_path / "kept"))
    config = dataclasses.replace(config, train=options)
    run_and_stop(config, tmp_path / "run", config.train.checkpoint_every + 1)
    assert not (tmp_path / "run" / "checkpoints").exists()
    shutil.rmtree(tmp_path / "run")
    found, output = quietly(config, tmp_path / "run")
    assert "goes on from step" in output
    assert_same_bits(found, state)
    assert load_run(tmp_path / "run").step == config.train.steps
    with pytest.raises(ValueError, match="checkpoints is ftp://bucket, but a bucket must be one of gs:// or s3://"):
        dataclasses.replace(options, checkpoints="ftp://bucket")


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="it is installed")
def test_a_bucket_needs_its_package(unbroken, tmp_path):
    config = with_train(unbroken[0], checkpoints="gs://bucket/run")
    with pytest.raises(UserError, match="gs://bucket/run cannot be reached: Please install gcsfs"):
        quietly(config, tmp_path / "run")


def test_a_run_without_a_whole_checkpoint_is_not_started_anew(unbroken, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(unbroken[1], path)
    for step in (4, 6):
        shutil.rmtree(path / "checkpoints" / str(step) / "state")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read\. the checkpoint of step 6 .* is damaged"):
        quietly(unbroken[0], path)


def test_a_signal_saves_and_ends_the_run(unbroken, tmp_path, monkeypatch):
    config, whole, expected, _ = unbroken
    path = tmp_path / "run"

    def interrupt(number, batch):
        if number == 3:
            signal.raise_signal(signal.SIGTERM)
        return batch

    with pytest.MonkeyPatch.context() as patch:
        change_batches(patch, interrupt)
        state, output = quietly(config, path)
    assert int(state.step) == 3
    assert "stopped by SIGTERM at step 3: the same command goes on from there" in output
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    state, _ = quietly(config, path)
    assert_same_bits(state, expected)
    assert losses(path) == losses(whole)


def test_another_batch_size_goes_on_where_the_data_was(corpus, tmp_path):
    config, path = without_memory(tiny(corpus, steps=2)), tmp_path / "run"
    quietly(config, path)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        whole = Data.batches
        patch.setattr(
            Data, "batches", lambda self, *args, **options: seen.append(args) or whole(self, *args, **options)
        )
        _, output = quietly(with_train(config, steps=4, batch_size=2), path)
    assert seen == [(8, 2, 0)]  # two batches of four windows were consumed
    assert "train.batch_size was 4 and is now 2" in output
    rows = [row for row in read_metrics(path / "metrics.jsonl") if "loss" in row]
    assert [row["tokens"] for row in rows] == [4 * 16, 8 * 16, 10 * 16, 12 * 16]


def test_checkpoints_that_are_kept_for_good(corpus, tmp_path):
    config = without_memory(tiny(corpus, checkpoint_every=1, keep_checkpoints=1, keep_every=2))
    quietly(config, tmp_path / "run")
    assert sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "4", "6"]


def test_the_running_mean_is_what_is_used(corpus, tmp_path):
    config = with_optimizer(without_memory(tiny(corpus)), ema=0.9)
    state, _ = quietly(config, tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert_same_bits(run.params, state.average)
    assert any(bool((a != b).any()) for a, b in zip(*map(jax.tree.leaves, (state.average, state.params)), strict=True))
    with pytest.raises(UserError, match=r"optimizer\.ema > 0 was True and is now False"):
        quietly(with_optimizer(config, ema=0.0), tmp_path / "run")


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
        MetricsFile(path, 1)
    assert path.read_bytes() == before


def test_rows_without_their_checkpoints_are_not_thrown_away(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for name in ("metrics.before.jsonl", "metrics.before1.jsonl"):
        path.write_text('{"step": 10}\n{"step": 20}\n')
        file = MetricsFile(path, 0)  # killed before its first checkpoint, or the checkpoints are gone
        file.close()
        assert file.put_aside == tmp_path / name
        assert len(read_metrics(tmp_path / name)) == 2
        assert path.read_text() == ""


def test_a_checkpoint_with_other_numbers_is_damaged(unbroken, tmp_path):
    config, whole, expected, _ = unbroken
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    (path / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()
    file = path / "checkpoints" / "6" / "progress" / "metadata"
    assert '"windows": 24' in file.read_text()
    file.write_text(file.read_text().replace('"windows": 24', '"windows": 20'))
    state, output = quietly(config, path)
    assert "step 6 in" in output
    assert "is damaged: its content is not what was written." in output
    assert_same_bits(state, expected)
    assert sorted(folder.name for folder in (path / "checkpoints").iterdir()) == ["4", "6", "6.damaged"]
    (path / "checkpoints" / "7.damaged").mkdir()
    (path / "checkpoints" / "8.damaged").mkdir()  # of an earlier time
    (path / "checkpoints" / "4").rename(path / "checkpoints" / "8")
    _, output = quietly(config, path)
    assert "step 8 in" in output
    assert "is damaged: it is of step 4." in output
    assert (path / "checkpoints" / "8.damaged1").is_dir()


def test_a_ruinous_update_is_not_saved(corpus, tmp_path, monkeypatch):
    # The losses of the first four steps are finite, and so are the numbers that the fourth update leaves.
    whole = loop.make_train_step

    def ruinous(config, mesh):
        step = whole(config, mesh)

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


def test_a_checkpoint_that_the_trainer_has_removed_since_is_not_damaged(unbroken, tmp_path):
    config, whole, _, _ = unbroken
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    state, _, warnings = checkpoints.restore_latest(make_state(config))
    checkpoints.close()
    assert (int(state.step), warnings) == (4, [])


def test_a_users_config_is_not_overwritten(corpus, tmp_path):
    config = tiny(corpus)
    (tmp_path / "config.toml").write_text("# mine\n" + config_to_toml(config))
    with pytest.raises(UserError, match=r"holds other files \(config\.toml\)"):
        quietly(config, tmp_path)
    assert (tmp_path / "config.toml").read_text().startswith("# mine")


def test_what_is_no_run_is_not_loaded(tmp_path, corpus):
    with pytest.raises(UserError, match="holds no run"):
        load_run(tmp_path / "nothing")
    run_and_stop(without_memory(tiny(corpus)), tmp_path / "run", 1)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        load_run(tmp_path / "run")


def test_a_changed_corpus_is_told(unbroken, tmp_path):
    corpus = make_corpus(tmp_path / "corpus")
    config, path = without_memory(tiny(corpus)), tmp_path / "run"
    run_and_stop(config, path, 3)
    (tmp_path / "corpus" / "new.txt").write_text("more text\n" * 20)
    _, output = quietly(config, path)
    assert "the corpus is not the one that the run was started on" in output
