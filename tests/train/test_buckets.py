"""Checkpoints in a bucket of Google Cloud Storage: `bucket.py` answers in its place, on loopback."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("gcsfs", reason="needs pip install -e '.[gcs]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
from bucket import Bucket
from jobs import ROOT, Job, read
from ldm_jax.config.toml import config_to_toml
from ldm_jax.errors import UserError
from ldm_jax.infer import load_model
from ldm_jax.train.metrics import read_metrics
from runs import assert_same_bits, make_corpus, quietly, tiny, with_train, without_memory

pytestmark = pytest.mark.slow
STEPS = 8


@pytest.fixture(scope="module")
def server():
    """The bucket; its address stays the same, because the clients read it only once."""
    with Bucket() as bucket, pytest.MonkeyPatch.context() as patch:
        for name, value in bucket.environment.items():
            patch.setenv(name, value)
        yield bucket


@pytest.fixture
def bucket(server):
    yield server
    server.objects.clear()
    server.writes, server.refuses_writes, server.refuses_after, server.dies_after = 0, False, None, None
    if not server.running:
        server.start()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A config, the directory of its run with local checkpoints, and its final state."""
    directory = tmp_path_factory.mktemp("finished")
    config = without_memory(tiny(make_corpus(directory / "corpus"), steps=STEPS, validate_every=4))
    return config, directory / "run", quietly(config, directory / "run")[0]


def in_bucket(config, **options):
    return with_train(config, checkpoints="gs://bucket/a/run", **options)


def steps_in(bucket):
    """The complete checkpoints, and all names of checkpoints, in the order of the names."""
    names = [name.split("/") for name in bucket.objects]
    complete = {name[2] for name in names if name[3:] == ["commit_success.txt"]}
    return sorted(complete), sorted({name[2] for name in names if len(name) > 3})


def start(directory, config, *flags):
    """Starts `scripts/train.py` in a process of its own."""
    (directory / "config.toml").write_text(config_to_toml(config))
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), str(directory / "config.toml")]
    command += ["--run", str(directory / "run"), *flags]
    with (directory / "log.txt").open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=directory, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )


def test_a_run_is_trained_continued_and_loaded(bucket, finished, tmp_path):
    config, _, state = finished
    run = tmp_path / "run"
    assert_same_bits(quietly(in_bucket(config), run)[0].params, state.params)
    assert steps_in(bucket) == (["6", "8"], ["6", "8"])
    shutil.rmtree(run)  # with its machine
    _, output = quietly(in_bucket(config, steps=STEPS + 2), run)
    assert f"resuming from step {STEPS}" in output
    assert steps_in(bucket) == (["10", "8"], ["10", "8"])
    assert load_model(run).step == STEPS + 2
    assert not any(path.is_dir() for path in run.iterdir())


def test_a_killed_run_resumes(bucket, finished, tmp_path):
    config = finished[0]
    process = start(tmp_path, in_bucket(config, steps=10000))
    try:
        end = time.monotonic() + 200
        while len(steps_in(bucket)[0]) < 2:
            assert time.monotonic() < end
            assert process.poll() is None, read(tmp_path / "log.txt")
            time.sleep(0.01)
        while steps_in(bucket)[0] == steps_in(bucket)[1]:  # until a save has begun
            assert time.monotonic() < end
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    complete, names = steps_in(bucket)
    partial = set(names) - set(complete)
    latest = max(map(int, complete))
    _, output = quietly(in_bucket(config, steps=latest + 1), tmp_path / "run")
    assert f"resuming from step {latest}" in output
    complete, names = steps_in(bucket)
    assert complete == names, f"the interrupted saves of {partial} are left"
    rows = {row["step"]: row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row}
    assert set(rows) == set(range(1, latest + 2))


def test_a_corrupt_checkpoint_is_renamed(bucket, finished, tmp_path):
    config, _, state = finished
    run = tmp_path / "run"
    quietly(in_bucket(config), run)
    largest = max((name for name in bucket.objects if "/8/" in name), key=lambda name: len(bucket.objects[name][1]))
    generation, content = bucket.objects[largest]
    bucket.objects[largest] = generation, content[: len(content) // 2] + b"!" + content[len(content) // 2 + 1 :]
    before = dict(bucket.objects)
    assert load_model(run).step == 6
    assert bucket.objects == before
    found, output = quietly(in_bucket(config), run)
    assert "warning     the checkpoint of step 8 in gs://bucket/a/run" in output
    assert_same_bits(found.params, state.params)
    assert steps_in(bucket)[1] == ["6", "8", "8.corrupt"]
    assert bucket.objects[largest.replace("/8/", "/8.corrupt/")][1] == before[largest][1]


def test_a_missing_bucket_is_an_immediate_error(bucket, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = with_train(finished[0], checkpoints="gs://missing/run")
    with pytest.raises(UserError, match="gs://missing/run: the bucket missing does not exist"):
        quietly(config, tmp_path / "run")
    assert not (tmp_path / "gs:").exists()


def test_a_bucket_that_refuses_writes_is_an_immediate_error(bucket, finished, tmp_path):
    bucket.refuses_writes = True
    with pytest.raises(UserError, match="gs://bucket/a/run: Forbidden"):
        quietly(in_bucket(finished[0]), tmp_path / "run")
    assert not bucket.objects


def test_a_bucket_that_begins_to_refuse_writes(bucket, finished, tmp_path, capfd):
    config, _, state = finished
    bucket.refuses_after = 40
    with pytest.raises(UserError, match=r"the checkpoint of step 8 could not be written to gs://bucket/a/run: "):
        quietly(in_bucket(config), tmp_path / "run")
    assert "Traceback" not in "".join(capfd.readouterr())
    bucket.refuses_writes = False
    found, output = quietly(in_bucket(config), tmp_path / "run")
    assert "resuming from step 2" in output
    assert_same_bits(found.params, state.params)
    assert steps_in(bucket) == (["6", "8"], ["6", "8"])


def test_an_outage_is_waited_for(bucket, finished, tmp_path):
    config, _, state = finished
    bucket.dies_after = 40
    process = start(tmp_path, in_bucket(config))
    try:
        end = time.monotonic() + 200
        while bucket.running:
            assert time.monotonic() < end
            assert process.poll() is None, read(tmp_path / "log.txt")
            time.sleep(0.05)
        time.sleep(3)
        bucket.start()
        assert process.wait(200) == 0, read(tmp_path / "log.txt")
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in read(tmp_path / "log.txt")
    assert_same_bits(load_model(tmp_path / "run").params, state.params)


def test_two_processes(bucket, finished, tmp_path):
    config = in_bucket(finished[0], steps=200)
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    flags = "--mesh.tensor", "2"
    with Job(tmp_path, tmp_path / "config.toml", tmp_path / "run", 1, *flags) as job:
        job.wait_for(lambda: len(steps_in(bucket)[0]) == 2)
        job.send(1, signal.SIGKILL)
        job.finish()
    latest = max(map(int, steps_in(bucket)[0]))
    shutil.rmtree(tmp_path / "run")
    last = str(latest + 2)
    with Job(tmp_path, tmp_path / "config.toml", tmp_path / "run", 1, *flags, "--train.steps", last) as job:
        assert job.finish() == [0, 0], job.output(0) + job.output(1)
    assert f"resuming from step {latest}" in job.output(0)
    complete, names = steps_in(bucket)
    assert complete == names
    assert last in complete
    assert load_model(tmp_path / "run").step == int(last)
