"""Killed at random moments, a run ends with the losses and the bits of an unbroken one."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ldm_jax.config_file import config_to_toml
from ldm_jax.train import load_run
from ldm_jax.train.metrics import read_metrics
from runs import assert_same_bits, make_corpus, tiny

TRAIN = Path(__file__).parents[2] / "scripts" / "train.py"


def start(config, path):
    command = [sys.executable, str(TRAIN), str(config), "--run", str(path)]
    with (config.parent / "errors.txt").open("w") as errors:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)


def finish(config, path):
    assert start(config, path).wait() == 0, (config.parent / "errors.txt").read_text()


def losses(path):
    rows = read_metrics(path / "metrics.jsonl")
    steps = [(row["step"], "loss" in row) for row in rows]
    assert len(steps) == len(set(steps))
    return {(row["step"], name): row[name] for row in rows for name in ("loss", "validation_loss") if name in row}


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.slow
def test_kill_in_the_middle_of_training_and_of_saves(tmp_path, request):
    draw = random.Random(request.config.getoption("--seed"))
    config = tmp_path / "config.toml"
    # A checkpoint every other step: half of the time goes to saves.
    config.write_text(config_to_toml(tiny(make_corpus(tmp_path / "corpus"), steps=60, validate_every=7)))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(config, whole)

    moments = []
    for kill in range(10):
        before = len(losses(broken))
        process = start(config, broken)
        if kill % 2:  # in a save: a folder with a temporary name is there
            wait_for(lambda: any("tmp" in entry.name for entry in (broken / "checkpoints").glob("*")), process)
        else:  # a while after the first new step
            wait_for(lambda before=before: len(losses(broken)) > before, process)
            time.sleep(draw.random() * 0.3)
        in_save = any("tmp" in entry.name for entry in (broken / "checkpoints").glob("*"))
        process.send_signal(signal.SIGKILL)
        process.wait()
        moments.append(f"{'save' if in_save else 'step'} after {len(losses(broken))} rows")
    print(*moments, sep="\n")
    assert sum(moment.startswith("save") for moment in moments) >= 3

    finish(config, broken)
    assert losses(broken) == losses(whole)
    assert_same_bits(load_run(broken).params, load_run(whole).params)
