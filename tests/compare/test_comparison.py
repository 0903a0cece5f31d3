"""Comparisons: missing runs are trained once, rates are tuned, figures are correct."""

import csv
import dataclasses
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ldm_jax.compare.costs import MethodCosts, read_costs, update_costs
from ldm_jax.compare.results import check_baseline, markdown, mean, report, results
from ldm_jax.compare.runs import config_hash, make_run, read_runs
from ldm_jax.compare.sweep import Sweep, missing_runs, say_plan
from ldm_jax.config import Config, MeshConfig, TrainConfig
from ldm_jax.config.toml import REMOVED_OPTIONS, read_config, read_methods
from ldm_jax.errors import UserError
from ldm_jax.mixers import LDMConfig, MixerConfig, MixerKind

ROOT = Path(__file__).parents[2]
# Stands in for train.py: the loss is a parabola in the logarithm of the rate, and depends a little on the seed.
TRAINER = """
import json, math, sys, time, tomllib
from pathlib import Path
config, directory = tomllib.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[3])
rate = config["optimizer"]["learning_rate"]
seed, steps = (config["train"][name] for name in ("seed", "steps"))
directory.mkdir(parents=True, exist_ok=True)
with (directory / "starts").open("a") as file:
    file.write("x")
time.sleep(SLEEP)
if rate > 0.1:
    print("error: step 3: the loss is nan.", file=sys.stderr)
    sys.exit(3)
if rate < 1e-5:
    sys.exit("error: the disk is full.")
best = 4e-3 if config["mixer"]["kind"] == "ldm" else 1e-3
loss = 1 + math.log2(rate / best) ** 2 / 10 + seed / 100 + (0.5 if config["mixer"]["kind"] == "ldm" else 0.7)
rows = [{"step": step, "loss": loss + 1 / step, "seconds": 2.0} for step in range(1, steps + 1)]
rows.append({"step": steps, "validation_loss": loss})
(directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.fixture
def trainer(tmp_path):
    def make(sleep=0.0):
        file = tmp_path / "trainer.py"
        file.write_text(TRAINER.replace("SLEEP", str(sleep)))
        return file

    return make


def methods():
    train = TrainConfig(steps=20)
    kinds = {"preln": MixerConfig(MixerKind.PRELN), "ldm": MixerConfig(MixerKind.LDM)}
    return {name: Config(mixer=kind, train=train) for name, kind in kinds.items()}


def starts(directory):
    return {file.parent.name: len(file.read_text()) for file in directory.glob("runs/*/starts")}


def test_rates_are_tuned_and_nothing_is_run_twice(tmp_path, trainer):
    directory, said = tmp_path / "out", []
    for _ in range(2):
        best = Sweep(directory, trainer(), 2, said.append).tune_and_repeat(methods(), [1e-3, 2e-3], [0, 1, 2])
        assert best == {"preln": 1e-3, "ldm": 4e-3}
    rows = read_runs(directory / "runs.csv")
    rates = {name: sorted(row.learning_rate for row in rows if row.method == name and row.seed == 0) for name in best}
    # The best of the first grid was at its edge: below it for PreLN, above it for LDM, until the next was worse.
    assert rates == {"preln": [5e-4, 1e-3, 2e-3], "ldm": [1e-3, 2e-3, 4e-3, 8e-3]}
    assert set(starts(directory).values()) == {1}
    assert len(starts(directory)) == len(rows) == 3 + 4 + 2 * 2
    assert {row.training_loss for row in rows if (row.method, row.seed, row.learning_rate) == ("ldm", 0, 4e-3)} == {
        round(1.5 + (1 / 19 + 1 / 20) / 2, 6)
    }


def test_the_plan_is_what_is_trained(tmp_path, trainer):
    directory, said = tmp_path / "out", []
    arguments = methods(), [1e-3, 2e-3], [0, 1, 2]
    sweep = Sweep(directory, trainer(), 1, said.append)
    assert len(missing_runs(sweep, *arguments)) == 2 * (2 + 2)
    assert not directory.exists()
    sweep.complete([make_run("preln", methods()["preln"], rate, 0) for rate in (1e-3, 2e-3)])
    found = [run.key for run in missing_runs(sweep, *arguments) if run.method == "preln"]
    assert found == [("preln", 5e-4, 0), ("preln", 1e-3, 1), ("preln", 1e-3, 2)]  # the best rate is at the edge
    say_plan(sweep, {"preln": methods()["preln"]}, *arguments[1:])
    assert "3 to train in all, 1 at a time: about 0:00:06" in said  # the trainer writes that a run takes 2 s
    sweep.tune_and_repeat(*arguments)
    assert not missing_runs(sweep, *arguments)


def test_rows_of_finished_runs_suffice(tmp_path, trainer):
    # The directories of the kept runs are not committed; their rows are.
    directory = tmp_path / "out"
    run = make_run("ldm", methods()["ldm"], 4e-3, 0)
    (row,) = Sweep(directory, trainer(), 1, print).complete([run])
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "runs.csv").write_bytes((directory / "runs.csv").read_bytes())
    assert Sweep(other, trainer(), 1, print).complete([run]) == [row]
    assert not starts(other)


def test_two_names_of_one_config_are_two_methods(tmp_path, trainer):
    twins = {"one": methods()["ldm"], "other": methods()["ldm"]}
    best = Sweep(tmp_path / "out", trainer(), 2, print).tune_and_repeat(twins, [2e-3, 4e-3, 8e-3], [0])
    assert best == {"one": 4e-3, "other": 4e-3}
    assert [row.method for row in read_runs(tmp_path / "out" / "runs.csv")] == 3 * ["one"] + 3 * ["other"]


def test_a_directory_that_cannot_be_written(tmp_path, trainer):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        Sweep(tmp_path / "file" / "out", trainer(), 1, print).tune_and_repeat(methods(), [1e-3], [0])


def test_the_config_hash_covers_what_the_runs_depend_on():
    config = methods()["ldm"]

    def changed(**sections):
        parts = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
        return config_hash(dataclasses.replace(config, **parts))

    preln = methods()["preln"]
    unused = dataclasses.replace(preln, mixer=dataclasses.replace(preln.mixer, ldm=LDMConfig(key_dim=6)))
    assert config_hash(unused) == config_hash(preln)
    run = make_run("ldm", config, 2e-3, 5)
    assert run.config_hash == config_hash(dataclasses.replace(config, mesh=MeshConfig(fsdp=2))) == config_hash(config)
    others = [
        config_hash(preln),
        changed(train={"steps": 21}),
        changed(model={"depth": 3}),
        changed(mixer={"ldm": LDMConfig(key_dim=6)}),
        changed(optimizer={"weight_decay": 0.2}),
    ]
    assert len({config_hash(config), *others}) == 1 + len(others)


def test_the_kept_rows_are_those_of_the_configs():
    # If an option was added, its default has to be left out of the hash: see `config_hash`.
    configs = ROOT / "configs"
    for name, files in (
        ("methods", sorted(configs.glob("compare/*.toml"))),
        ("variants", [configs / "ldm_variants.toml"]),
    ):
        directory = configs / "compare" / "results" / name
        rows = {run.method: run.config_hash for run in read_runs(directory / "runs.csv")}
        rows.pop("into_stream", None)  # its option was removed
        assert rows == {method: config_hash(config) for method, config in read_methods(files).items()}
        costs = read_costs(directory)
        assert {method: each.config_hash for method, each in costs.items()} == (rows if costs else {})


def test_a_removed_option_is_part_of_the_hash(monkeypatch):
    before = config_hash(methods()["ldm"])
    monkeypatch.setitem(REMOVED_OPTIONS, "mixer.ldm.some_option", 3)
    assert config_hash(methods()["ldm"]) != before
    preln = config_hash(methods()["preln"])
    monkeypatch.delitem(REMOVED_OPTIONS, "mixer.ldm.some_option")
    assert config_hash(methods()["preln"]) == preln


def test_runs_of_another_config_are_refused(tmp_path, trainer):
    directory = tmp_path / "out"
    Sweep(directory, trainer(), 1, print).complete([make_run("ldm", methods()["ldm"], 4e-3, 0)])
    before = (directory / "runs.csv").read_text()
    other = dataclasses.replace(methods()["ldm"], train=TrainConfig(steps=10))
    with pytest.raises(UserError, match=rf"runs of ldm with another config.*{config_hash(other)}"):
        Sweep(directory, trainer(), 1, print).tune_and_repeat({"ldm": other}, [2e-3], [1])
    assert (directory / "runs.csv").read_text() == before
    row = before.splitlines()[1]
    (directory / "runs.csv").write_text(
        before + row.replace(",0,0.004", ",1,0.004").replace(row[:8], "00000000") + "\n"
    )
    with pytest.raises(UserError, match="ldm with different config hashes"):
        report(directory)


@pytest.mark.slow
def test_costs_are_measured_once(tmp_path):
    tiny = read_config(ROOT / "configs" / "tiny.toml")
    tiny = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, depth=1), train=TrainConfig(batch_size=1))
    said = []
    update_costs(tmp_path, {"tiny": tiny}, said.append)
    assert said
    costs = read_costs(tmp_path)["tiny"]
    assert costs.config_hash == config_hash(tiny)
    assert costs.parameters > costs.mixer_parameters > 0
    assert min(costs.flops_per_token, costs.temporary_bytes, costs.step_seconds) > 0
    said.clear()
    update_costs(tmp_path, {"tiny": tiny}, said.append)
    assert not said
    (tmp_path / "costs.json").write_text('{"tiny": {}}')
    with pytest.raises(UserError, match=r"costs.json cannot be read"):
        read_costs(tmp_path)


def test_a_diverged_run_is_a_row_and_a_failed_one_an_error(tmp_path, trainer):
    sweep = Sweep(tmp_path / "out", trainer(), 1, print)
    (row,) = sweep.complete([make_run("ldm", methods()["ldm"], 0.5, 0)])
    assert row.diverged
    assert read_runs(sweep.file)[0].diverged
    with pytest.raises(UserError, match=r"ldm-lr1e-06-seed0-\w+ failed \(error: the disk is full.\).*\.log"):
        sweep.complete([make_run("ldm", methods()["ldm"], 1e-6, 0)])
    with pytest.raises(UserError, match=r"jobs is 0"):
        Sweep(tmp_path / "out", trainer(), 0, print).tune_and_repeat(methods(), [1e-3], [0])
    for rates, seeds, words in (
        ([], [0], r"learning rates are \(\)"),
        ([1e-3], [0, 0], r"seeds are \(0, 0\)"),
        ([-1.0], [0], r"learning rates are \(-1.0,\)"),
    ):
        with pytest.raises(UserError, match=words):
            sweep.tune_and_repeat(methods(), rates, seeds)


SWEEP = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_comparison import methods
from ldm_jax.compare.runs import make_run
from ldm_jax.compare.sweep import Sweep
runs = [make_run(name, config, 4e-3, seed) for name, config in methods().items() for seed in range(4)]
Sweep(Path({directory!r}), Path({trainer!r}), 2).complete(runs)
"""


@pytest.mark.parametrize("kind", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_killed_comparison_is_resumed(tmp_path, trainer, kind):
    directory, seconds = tmp_path / "out", 0.5
    code = SWEEP.format(tests=str(Path(__file__).parent), directory=str(directory), trainer=str(trainer(seconds)))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(read_runs(directory / "runs.csv")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(kind)
    assert process.wait(30) != 0
    done = {run.key for run in read_runs(directory / "runs.csv")}
    assert 2 <= len(done) < 8
    time.sleep(2 * seconds)
    assert len(list(directory.glob("runs/*/metrics.jsonl"))) == len(done)  # no run has outlived its sweep
    before = starts(directory)
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert len(read_runs(directory / "runs.csv")) == 8
    finished = [name for name in before if any(name.startswith(f"{m}-lr{r:g}-seed{s}-") for m, r, s in done)]
    assert len(finished) == len(done)
    assert all(starts(directory)[name] == before[name] for name in finished)


def test_a_run_in_training_is_waited_for_and_keeps_its_log(tmp_path, trainer):
    run, directory, said = make_run("ldm", methods()["ldm"], 4e-3, 0), tmp_path / "out", []
    (directory / "runs" / run.name).mkdir(parents=True)
    log = directory / "runs" / f"{run.name}.log"
    log.write_text("a line of an earlier start\n")
    locks = [(folder / ".lock").open("w") for folder in (directory, directory / "runs" / run.name)]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)

    def say(line):
        if "waiting" in line:
            said.append(line)
            locks.pop(0).close()

    Sweep(directory, trainer(), 1, say).complete([run])
    assert ["another comparison" in line for line in said] == [True, False]
    assert log.read_text().startswith("a line of an earlier start\n")


def test_other_files_and_shared_checkpoints_are_refused(tmp_path, trainer):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"thesis\.tex.*--out"):
        Sweep(tmp_path, trainer(), 1, print).tune_and_repeat(methods(), [1e-3], [0])
    shared = dataclasses.replace(methods()["ldm"], train=TrainConfig(checkpoints="elsewhere"))
    with pytest.raises(UserError, match=r"train\.checkpoints of ldm is elsewhere"):
        Sweep(tmp_path / "out", trainer(), 1, print).tune_and_repeat({"ldm": shared}, [1e-3], [0])


def test_student_intervals():
    # By hand: the mean of 1, 2, 4 is 7/3, s = 1.527525, t(.975, 2) = 4.302653.
    found = mean([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.half_width == pytest.approx(4.302653 * 1.527525 / math.sqrt(3), rel=1e-6)
    assert math.isinf(mean([1.0]).half_width)
    assert mean([1.0]).covers_zero
    assert not mean([1.0, 1.1, 1.2]).covers_zero
    diverged = mean([1.0, math.inf, 1.1])
    assert math.isinf(diverged.mean)
    assert not diverged.covers_zero


def test_results_are_paired_by_seed(tmp_path, trainer, capsys):
    directory = tmp_path / "out"
    Sweep(directory, trainer(), 2, print).tune_and_repeat(methods(), [1e-3, 2e-3, 4e-3], [0, 1, 2])
    costs = {
        name: MethodCosts(config_hash(methods()[name]), 100, 10, 5e6, 2.0**20, seconds)
        for name, seconds in (("preln", 2.0), ("ldm", 3.0))
    }
    (directory / "costs.json").write_text(json.dumps({name: dataclasses.asdict(each) for name, each in costs.items()}))
    runs = read_runs(directory / "runs.csv")
    rows = results(runs, costs)
    assert [row.method for row in rows] == ["ldm", "preln"]
    assert rows[0].difference.mean == pytest.approx(-0.2)  # equal on all seeds, although the losses differ
    assert rows[0].difference.half_width == pytest.approx(0, abs=1e-5)
    assert rows[0].loss.mean == pytest.approx(1.51)
    assert (rows[0].learning_rate, rows[0].step_over_baseline, len(rows[0].runs)) == (4e-3, 1.5, 3)
    assert "| ldm | 100 (10) | 5,000 | 1 | 1.50 | 0.004 | 3 | 1.5100 ± 0.0248 | -0.2000 ± 0.0000 |" in markdown(rows)
    capsys.readouterr()
    before = sorted(directory.iterdir())
    report(directory)
    assert "| preln |" in capsys.readouterr().out
    assert sorted(directory.iterdir()) == before
    report(directory, out=directory)
    against = results(runs, costs, baseline="ldm")
    assert against[1].difference.mean == pytest.approx(0.2)
    assert "| 0.67 | 0.001 | 3 | 1.7100 ± 0.0248 | +0.2000 ± 0.0000 |" in markdown(against, "ldm")
    with pytest.raises(UserError, match="pre, but there is no such method: choose from ldm, preln"):
        report(directory, "pre")
    check_baseline("preln", ["ldm"])  # the default need not be there
    table = list(csv.DictReader((directory / "results.csv").read_text().splitlines()))
    assert [row["method"] for row in table] == ["ldm", "preln"]
    assert float(table[0]["difference"]) == pytest.approx(-0.2)
    assert table[0]["differences"] == "-0.200000 -0.200000 -0.200000"
    for plot in ("curves.png", "loss_against_compute.png", "final_losses.png"):
        assert (directory / plot).stat().st_size > 10_000
    # Costs of another config are not those of the runs; without costs the table has gaps.
    stale = {**costs, "ldm": dataclasses.replace(costs["ldm"], config_hash="00000000")}
    assert [row.costs for row in results(runs, stale)] == [None, costs["preln"]]
    (directory / "costs.json").unlink()
    capsys.readouterr()
    report(directory)
    assert "| ldm | 0.004 | 3 | 1.5100 ± 0.0248 | -0.2000 ± 0.0000 |" in capsys.readouterr().out
    assert "chosen on the first seed" in " ".join(markdown(rows).split())
    untuned = results(
        [run for run in runs if run.seed and run.learning_rate == (4e-3 if run.method == "ldm" else 1e-3)], {}
    )
    assert "not tuned" in markdown(untuned)
    alone = results([run for run in runs if run.seed == 0], {})
    assert "covers 0" not in markdown(alone)  # one seed has no interval
    with pytest.raises(UserError, match="nothing has no finished run"):
        report(tmp_path / "nothing")
