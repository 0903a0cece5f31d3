"""Several processes train as one does: same losses, recovery from kills, and no hangs."""

import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from jobs import HEARTBEAT_SECONDS, ROOT, Job, train_alone
from ldm_jax.config.command_line import TrainArguments, parse_over_config
from ldm_jax.config.toml import config_to_toml
from ldm_jax.errors import UserError
from ldm_jax.parallel import Hosts, LocalRows, first_failure, is_leader, join, on_leader, require_same
from ldm_jax.train.metrics import read_metrics
from ldm_jax.train.stop_signal import StopSignal
from runs import make_corpus, tiny, without_memory

ACROSS_TENSOR = 1, "--mesh.tensor", "2"
"""One device for each process."""
ACROSS_FSDP = 2, "--mesh.fsdp", "2", "--mesh.tensor", "2"
"""Two devices for each process: heads are sharded within a process, batch and parameters between processes."""
MARGIN_SECONDS = 60.0
"""Allowance for a busy machine."""


def write_config(directory, simple=False, **train_options):
    config = tiny(make_corpus(directory / "corpus"), **train_options)
    (directory / "config.toml").write_text(config_to_toml(without_memory(config) if simple else config))
    return directory / "config.toml"


def losses(run):
    names = "loss", "validation_loss"
    return {
        (row["step"], name): row[name] for row in read_metrics(run / "metrics.jsonl") for name in names if name in row
    }


def check_same(run, expected, tolerance=1e-6):
    found, others = losses(run), losses(expected)
    assert found.keys() == others.keys()
    assert max(abs(value - others[place]) for place, value in found.items()) <= tolerance


def check_finished(job):
    assert job.finish() == [0, 0], job.output(0) + job.output(1)


def test_two_processes_train_as_one(tmp_path):
    config = write_config(tmp_path, simple=True, steps=4, checkpoint_every=4, sample_tokens=1)
    devices, *flags = ACROSS_TENSOR
    with Job(tmp_path, config, tmp_path / "two", devices, *flags) as job:
        check_finished(job)
    train_alone(config, tmp_path / "one", 2 * devices, *flags)
    check_same(tmp_path / "two", tmp_path / "one")
    assert "2 x cpu (cpu) over 2 processes" in job.output(0)
    assert re.fullmatch(r"waiting for 2 processes at .*, at most 300 seconds", job.output(1).strip())
    assert (tmp_path / "two" / "sample.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "across",
    [pytest.param(ACROSS_TENSOR, id="tensor"), pytest.param(ACROSS_FSDP, id="fsdp", marks=pytest.mark.exhaustive)],
)
def test_runs_resume_on_another_number_of_processes(tmp_path, across):
    config = write_config(tmp_path, steps=6, batch_size=8, accumulation=2)
    devices, *flags = across
    for name, first_alone in (("first_two", False), ("first_one", True)):
        for steps, alone in (("6", first_alone), ("9", not first_alone)):
            if alone:
                train_alone(config, tmp_path / name, 2 * devices, *flags, "--train.steps", steps)
            else:
                with Job(tmp_path, config, tmp_path / name, devices, *flags, "--train.steps", steps) as job:
                    check_finished(job)
    check_same(tmp_path / "first_two", tmp_path / "first_one")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The config of a run of 80 steps, and a run of it without interruption."""
    directory = tmp_path_factory.mktemp("finished")
    config = write_config(directory, simple=True, steps=80, checkpoint_every=8, validate_every=40)
    devices, *flags = ACROSS_TENSOR
    with Job(directory, config, directory / "whole", devices, *flags) as job:
        check_finished(job)
    return config, directory / "whole"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_killed_process_ends_the_other_and_both_resume(tmp_path, finished, victim):
    config, whole = finished
    devices, *flags = ACROSS_TENSOR
    with Job(tmp_path, config, tmp_path / "run", devices, *flags) as job:
        job.wait_for_checkpoint(8)
        job.send(victim)
        before = time.monotonic()
        statuses = job.finish()
        assert time.monotonic() - before < HEARTBEAT_SECONDS + MARGIN_SECONDS
        assert statuses[victim] == -signal.SIGKILL
        assert statuses[1 - victim] != 0
        assert "the connection to another process is lost" in job.output(
            1 - victim
        ) or "another task died" in job.output(1 - victim)
        assert "Traceback" not in job.output(1 - victim)
    with Job(tmp_path, config, tmp_path / "run", devices, *flags) as job:
        check_finished(job)
    assert "resuming from step" in job.output(0)
    check_same(tmp_path / "run", whole, tolerance=0.0)


@pytest.mark.slow
def test_a_frozen_host_ends_the_job(tmp_path, finished):
    devices, *flags = ACROSS_TENSOR
    with Job(tmp_path, finished[0], tmp_path / "run", devices, *flags, "--train.steps", "100000") as job:
        job.wait_for_step(2)
        job.send(1, signal.SIGSTOP)  # as when its network fails: no connection is closed
        before = time.monotonic()
        assert job.processes[0].wait(HEARTBEAT_SECONDS + MARGIN_SECONDS) != 0
        assert time.monotonic() - before > HEARTBEAT_SECONDS / 2
        assert "another task died" in job.output(0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)])
def test_a_signal_to_one_host_stops_all_after_the_same_step(tmp_path, finished, number):
    config, whole = finished
    devices, *flags = ACROSS_TENSOR
    with Job(tmp_path, config, tmp_path / "run", devices, *flags) as job:
        job.wait_for_step(5)
        job.send(1, number)
        check_finished(job)
    assert f"stopped by {number.name} after step" in job.output(0)
    assert max(step for step, _ in losses(tmp_path / "run")) < 80
    with Job(tmp_path, config, tmp_path / "run", devices, *flags) as job:
        check_finished(job)
    check_same(tmp_path / "run", whole, tolerance=0.0)


def test_a_signal_that_arrives_during_a_vote_is_kept():
    votes = []

    def vote(number):
        if not votes:
            signal.raise_signal(signal.SIGTERM)  # while this process waits for the others
        votes.append(number)
        return number

    with StopSignal() as stop:
        assert not stop.requested(vote)
        assert stop.requested(vote)
    assert votes == [0, signal.SIGTERM]
    assert stop.name == "SIGTERM"


@pytest.mark.slow
def test_the_other_processes_report_why_one_failed(tmp_path, finished):
    devices, *flags = ACROSS_TENSOR
    with Job(tmp_path, finished[0], tmp_path / "run", devices, *flags, "--train.steps", "100000") as job:
        job.wait_for_step(2)
        end = time.monotonic() + MARGIN_SECONDS
        while job.processes[1].poll() is None and time.monotonic() < end:
            job.send(1, signal.SIGINT)  # the second one exits without saving
            time.sleep(0.05)
        assert job.finish() == [1, 1]
    assert job.output(1).splitlines()[-1].startswith("interrupted: ")
    assert "error: process 1 has failed: interrupted" in job.output(0)


@pytest.mark.slow
def test_other_code_and_other_options_are_refused(tmp_path, finished):
    package = tmp_path / "package"
    shutil.copytree(ROOT / "ldm_jax", package / "ldm_jax", ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "ldm_jax" / "axes.py").open("a") as file:
        file.write("# another line\n")
    devices, *flags = ACROSS_TENSOR
    other_options = ("--train.seed", "1", "--train.keep_every", "9")
    for options, what in (
        ({"package_of_process_1": package}, "code of process 1"),
        ({"of_process_1": other_options}, "train.seed of process 1, train.keep_every of process 1"),
    ):
        with Job(tmp_path, finished[0], tmp_path / "run", devices, *flags, **options) as job:
            assert job.finish() == [1, 1]
        for index in range(2):
            assert f"error: {what}: not the same as on process 0" in job.output(index)
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_directory_that_the_hosts_do_not_share_is_refused(tmp_path, finished):
    devices, *flags = ACROSS_TENSOR
    options = {"of_process_1": ("--run", str(tmp_path / "other"))}
    with Job(tmp_path, finished[0], tmp_path / "run", devices, *flags, **options) as job:
        assert job.finish() == [1, 1]
    assert f"process 1 does not see the run of process 0 in {tmp_path / 'other'}" in job.output(0)
    # All processes report an error of process 0.
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    with Job(tmp_path, finished[0], tmp_path / "notes", devices, *flags) as job:
        assert job.finish() == [1, 1]
    for index in range(2):
        assert "holds other files (diary.txt)" in job.output(index)


@pytest.mark.usefixtures("unchecked_annotations")
def test_each_local_row_is_read_once():
    parts = {"a": (slice(6, 8),), "b": (slice(0, 2),), "c": (slice(6, 8),)}
    place = SimpleNamespace(addressable_devices_indices_map=lambda shape: parts)
    assert LocalRows(place, 8).rows == [0, 1, 6, 7]
    everywhere = SimpleNamespace(addressable_devices_indices_map=lambda shape: {"a": (slice(None),)})
    assert LocalRows(everywhere, 3).rows == [0, 1, 2]


def test_one_process_does_not_communicate():
    assert is_leader()
    assert first_failure("why") == "why"
    assert first_failure(None) is None
    require_same({"config": "a"})
    done = []
    on_leader(lambda: done.append(1))
    assert done == [1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("host:1",), "needs --process and --processes"),
        (("host:1", 0), "needs --process and --processes"),
        (("host", 0, 2), "--distributed is host, .*HOST:PORT"),
        (("auto", 0, 2), "leave them out"),
        (("host:1", 2, 2), "--process is 2, .*--processes"),
        (("host:1", 0, 2, 0), "heartbeat_seconds is 0"),
    ],
)
def test_flags_that_do_not_go_together(options, words):
    with pytest.raises(ValueError, match=words):
        Hosts(*options)


def test_an_unusable_address_is_an_immediate_error():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen at localhost:{port}"):
            join(Hosts(f"localhost:{port}", 0, 2))
    with pytest.raises(UserError, match=r"--distributed nowhere\.invalid:1234"):
        join(Hosts("nowhere.invalid:1234", 1, 2))
    for port in (0, 65536):
        with pytest.raises(ValueError, match=f"localhost:{port}.*1 to 65535"):
            Hosts(f"localhost:{port}", 0, 2)


def test_flags():
    config = str(ROOT / "configs" / "tiny.toml")
    assert parse_over_config(TrainArguments, [config]).hosts is None
    both = parse_over_config(TrainArguments, [config, "--distributed", "a:1", "--process", "1", "--processes", "2"])
    assert both.hosts == Hosts("a:1", 1, 2)
    with pytest.raises(UserError, match="need --distributed"):
        _ = parse_over_config(TrainArguments, [config, "--process", "1"]).hosts
    with pytest.raises(UserError, match="leave them out"):
        _ = parse_over_config(TrainArguments, [config, "--distributed", "auto", "--process", "1"]).hosts
