"""Where checkpoints may be stored, and what is said if they cannot be."""

import resource
import sys
from pathlib import Path

import pytest

from ldm_jax.config import TrainConfig
from ldm_jax.errors import UserError
from ldm_jax.runs.checkpoints import Checkpoints, Progress
from ldm_jax.runs.storage import require_writable, storage_path
from ldm_jax.train import make_state
from runs import make_corpus, quietly, tiny, with_train, without_memory


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return without_memory(tiny(make_corpus(tmp_path_factory.mktemp("text") / "corpus")))


@pytest.mark.parametrize(
    "where", ["gs:/x/run", "gs://bucket", "gs:///run", "s3://bucket/run", "GS://x/run", "file:///x"]
)
def test_other_addresses_are_refused(where):
    with pytest.raises(ValueError, match=f"checkpoints is {where}.*gs://BUCKET/DIRECTORY"):
        TrainConfig(checkpoints=where)


@pytest.mark.parametrize("where", ["gs://bucket/run", "gs://bucket/a/run", "/a/run", "a:b/run"])
def test_directories_and_buckets(where):
    assert TrainConfig(checkpoints=where).checkpoints == where


def test_a_run_directory_is_not_in_a_bucket(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"gs:/bucket/run.*train\.checkpoints"):
        quietly(config, Path("gs://bucket/run"))
    assert not list(tmp_path.iterdir())


def test_a_bucket_needs_its_package(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"gs://bucket/run .*pip install 'ldm_jax\[gcs\]'"):
        quietly(with_train(config, checkpoints="gs://bucket/run"), tmp_path / "run")


def test_an_unusable_directory_is_an_error_before_the_first_step(config, tmp_path):
    (tmp_path / "file").write_text("mine")
    for where, why in (("/proc/checkpoints", "No such file"), (str(tmp_path / "file"), "File exists")):
        with pytest.raises(UserError, match=f"{where}: {why}"):
            quietly(with_train(config, checkpoints=where), tmp_path / "run")
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_check_leaves_nothing(tmp_path):
    require_writable(storage_path(tmp_path / "a" / "b"))
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_save_that_fails_in_the_background_is_one_sentence(config, tmp_path, capfd):
    checkpoints, state, progress = Checkpoints(tmp_path, keep=2), make_state(config), Progress(0, 0.0, "", "", {})
    assert [checkpoints.save(1, state, progress), checkpoints.wait()] == [None, None]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as on a full disk
        reasons = [checkpoints.save(2, state, progress), checkpoints.wait()]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (why,) = filter(None, reasons)
    assert "of step 2" in why
    assert "File too large" in why
    assert "of step 1 is kept" in why
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert [checkpoints.save(3, state, progress), checkpoints.wait()] == [None, None]
    checkpoints.close()
    assert "".join(capfd.readouterr()) == ""
