"""A comparison: what is missing is run, what is finished is not, rates are tuned, figures are right."""

import csv
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ldm_jax.compare.costs import MethodCosts
from ldm_jax.compare.results import markdown, report, results
from ldm_jax.compare.runs import make_run, read_finished, stored_methods
from ldm_jax.compare.statistics import mean
from ldm_jax.compare.sweep import Sweep
from ldm_jax.config import Config, TrainConfig
from ldm_jax.config.toml import config_to_toml, read_methods
from ldm_jax.errors import UserError
from ldm_jax.mixers import LDMConfig, MixerConfig, MixerKind

# In the place of train.py: the loss is a parabola of the logarithm of the rate, best at 4e-3, a little by seed.
TRAINER = """
import json, math, sys, time, tomllib
from pathlib import Path
config, folder = tomllib.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[3])
rate = config["optimizer"]["learning_rate"]
seed, steps = (config["train"][name] for name in ("seed", "steps"))
folder.mkdir(parents=True, exist_ok=True)
with (folder / "starts").open("a") as file:
    file.write("x")
time.sleep(SLEEP)
if rate > 0.1:
    sys.exit("error: step 3: the loss is nan and the gradient's norm nan, so the run stops. Lower the rate.")
if rate < 1e-5:
    sys.exit("error: the disk is full.")
best = 4e-3 if config["mixer"]["kind"] == "ldm" else 1e-3
loss = 1 + math.log2(rate / best) ** 2 / 10 + seed / 100 + (0.5 if config["mixer"]["kind"] == "ldm" else 0.7)
rows = [{"step": step, "loss": loss + 1 / step, "seconds": 2.0} for step in range(1, steps + 1)]
rows.append({"step": steps, "validation_loss": loss})
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
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


def starts(folder):
    return {file.parent.name: len(file.read_text()) for file in folder.glob("runs/*/starts")}


def test_rates_are_tuned_and_nothing_is_run_twice(tmp_path, trainer):
    folder, said = tmp_path / "out", []
    for _ in range(2):
        best = Sweep(folder, trainer(), 2, said.append).tune_and_repeat(methods(), [1e-3, 2e-3], [0, 1, 2])
        assert best == {"preln": 1e-3, "ldm": 4e-3}
    rows = read_finished(folder / "runs.csv")
    rates = {name: sorted(row.learning_rate for row in rows if row.method == name and row.seed == 0) for name in best}
    # The best of the first grid was at its edge: below it for PreLN, above it for LDM, until the next was worse.
    assert rates == {"preln": [5e-4, 1e-3, 2e-3], "ldm": [1e-3, 2e-3, 4e-3, 8e-3]}
    assert set(starts(folder).values()) == {1}
    assert len(starts(folder)) == len(rows) == 3 + 4 + 2 * 2
    assert {row.training_loss for row in rows if (row.method, row.seed, row.learning_rate) == ("ldm", 0, 4e-3)} == {
        round(1.5 + (1 / 19 + 1 / 20) / 2, 6)
    }


def test_finished_rows_are_enough(tmp_path, trainer):
    # The runs' folders are not committed; their rows are.
    folder = tmp_path / "out"
    run = make_run("ldm", methods()["ldm"], 4e-3, 0)
    (row,) = Sweep(folder, trainer(), 1, print).complete([run])
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "runs.csv").write_bytes((folder / "runs.csv").read_bytes())
    assert Sweep(other, trainer(), 1, print).complete([run]) == [row]
    assert not starts(other)


def test_two_names_of_one_config_are_two_methods(tmp_path, trainer):
    twins = {"one": methods()["ldm"], "other": methods()["ldm"]}
    best = Sweep(tmp_path / "out", trainer(), 2, print).tune_and_repeat(twins, [2e-3, 4e-3, 8e-3], [0])
    assert best == {"one": 4e-3, "other": 4e-3}
    assert [row.method for row in read_finished(tmp_path / "out" / "runs.csv")] == 3 * ["one"] + 3 * ["other"]


def test_a_folder_that_cannot_be_written(tmp_path, trainer):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        Sweep(tmp_path / "file" / "out", trainer(), 1, print).tune_and_repeat(methods(), [1e-3], [0])


def test_options_of_other_mixers_do_not_count():
    config = methods()["preln"]
    other = dataclasses.replace(config, mixer=dataclasses.replace(config.mixer, ldm=LDMConfig(key_dim=6)))
    assert make_run("a", config, 1e-3, 0).config_hash == make_run("b", other, 1e-3, 0).config_hash
    for changed in (make_run("a", config, 2e-3, 0), make_run("a", config, 1e-3, 1), make_run("a", Config(), 1e-3, 0)):
        assert changed.config_hash != make_run("a", config, 1e-3, 0).config_hash


def test_a_diverged_run_is_a_row_and_a_failed_one_an_error(tmp_path, trainer):
    sweep = Sweep(tmp_path / "out", trainer(), 1, print)
    (row,) = sweep.complete([make_run("ldm", methods()["ldm"], 0.5, 0)])
    assert row.diverged
    assert read_finished(sweep.file)[0].diverged
    with pytest.raises(UserError, match=r"the run ldm-lr1e-06-seed0-\w+ failed \(error: the disk is full.\): see"):
        sweep.complete([make_run("ldm", methods()["ldm"], 1e-6, 0)])
    with pytest.raises(UserError, match=r"jobs is 0"):
        Sweep(tmp_path / "out", trainer(), 0, print).tune_and_repeat(methods(), [1e-3], [0])
    for rates, seeds, words in (
        ([], [0], "the learning rates are"),
        ([1e-3], [0, 0], "none twice"),
        ([-1.0], [0], "rates"),
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
Sweep(Path({folder!r}), Path({trainer!r}), 2).complete(runs)
"""


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_comparison_goes_on(tmp_path, trainer, kind):
    folder = tmp_path / "out"
    code = SWEEP.format(tests=str(Path(__file__).parent), folder=str(folder), trainer=str(trainer(0.5)))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(read_finished(folder / "runs.csv")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(kind)
    assert process.wait(30) != 0
    done = {run.config_hash for run in read_finished(folder / "runs.csv")}
    assert 2 <= len(done) < 8
    time.sleep(1.0)  # what SIGKILL leaves running; SIGTERM ends the runs, too
    if kind is signal.SIGTERM:
        assert len(list(folder.glob("runs/*/metrics.jsonl"))) == len(done)
    before = starts(folder)
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert len(read_finished(folder / "runs.csv")) == 8
    finished = [name for name in before if name[-8:] in done]
    assert all(starts(folder)[name] == before[name] for name in finished)


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
    folder = tmp_path / "out"
    Sweep(folder, trainer(), 2, print).tune_and_repeat(methods(), [1e-3, 2e-3, 4e-3], [0, 1, 2])
    costs = {name: MethodCosts(100, 10, 5e6, 2.0**20, seconds) for name, seconds in (("preln", 2.0), ("ldm", 3.0))}
    hashes = {name: make_run(name, config, 0.1, 0).config_hash for name, config in methods().items()}
    stored = {hashes[name]: dataclasses.asdict(each) for name, each in costs.items()}
    (folder / "costs.json").write_text(json.dumps(stored))
    rows = results(folder, stored_methods(folder), costs)
    assert [row.method for row in rows] == ["ldm", "preln"]
    assert rows[0].difference.mean == pytest.approx(-0.2)  # the same on every seed, whatever the seeds' own spread
    assert rows[0].difference.half_width == pytest.approx(0, abs=1e-5)
    assert rows[0].loss.mean == pytest.approx(1.51)
    assert (rows[0].learning_rate, rows[0].step_over_baseline, len(rows[0].runs)) == (4e-3, 1.5, 3)
    assert "| ldm | 100 (10) | 5,000 | 1 | 1.50 | 0.004 | 3 | 1.5100 ± 0.0248 | -0.2000 ± 0.0000 |" in markdown(rows)
    report(folder, stored_methods(folder))
    assert "| preln |" in capsys.readouterr().out
    against = results(folder, stored_methods(folder), costs, baseline="ldm")
    assert against[1].difference.mean == pytest.approx(0.2)
    assert "| 0.67 | 0.001 | 3 | 1.7100 ± 0.0248 | +0.2000 ± 0.0000 |" in markdown(against, "ldm")
    with pytest.raises(UserError, match="no such method: choose from ldm, preln"):
        report(folder, stored_methods(folder), "pre")
    table = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    assert [row["method"] for row in table] == ["ldm", "preln"]
    assert float(table[0]["difference"]) == pytest.approx(-0.2)
    for picture in ("curves.png", "loss_against_compute.png", "final_losses.png"):
        assert (folder / picture).stat().st_size > 10_000
    # Where nothing has been run as it is now, what there was is left as it is.
    before = (folder / "results.md").read_text()
    other = {"ldm": dataclasses.replace(methods()["ldm"], model=dataclasses.replace(methods()["ldm"].model, depth=3))}
    with pytest.raises(UserError, match="no finished run of these methods as they are now"):
        report(folder, other)
    assert (folder / "results.md").read_text() == before
    # A config that has changed since has no runs.
    changed = dataclasses.replace(methods()["ldm"], model=dataclasses.replace(methods()["ldm"].model, depth=2))
    assert [row.method for row in results(folder, {**methods(), "ldm": changed}, costs)] == ["preln"]


def test_variants(tmp_path):
    (tmp_path / "base.toml").write_text(config_to_toml(methods()["ldm"]))
    (tmp_path / "variants.toml").write_text(
        'base = "base.toml"\n[variants.plain]\n[variants.wide.mixer.ldm]\nkey_dim = 8\n'
        "[variants.wide.model]\ndepth = 3\n"
    )
    found = read_methods([tmp_path / "variants.toml"])
    assert found["plain"] == methods()["ldm"]
    deeper = (tmp_path / "variants.toml").read_text().replace("[variants.pl", "[model]\ndepth = 5\n[variants.pl")
    (tmp_path / "deeper.toml").write_text(deeper)
    assert [config.model.depth for config in read_methods([tmp_path / "deeper.toml"]).values()] == [5, 3]
    (tmp_path / "typo.toml").write_text(deeper.replace("[model]", "[modle]"))
    with pytest.raises(UserError, match="unknown key modle"):
        read_methods([tmp_path / "typo.toml"])
    assert (found["wide"].mixer.ldm.key_dim, found["wide"].model.depth, found["wide"].train.steps) == (8, 3, 20)
    with pytest.raises(UserError, match="two configs named base"):
        read_methods([tmp_path / "base.toml"] * 2)
    with pytest.raises(UserError, match="there is no config"):
        read_methods([])
    (tmp_path / "variants.toml").write_text('base = "base.toml"\n[variants.bad.mixer.ldm]\nkey_dmi = 8\n')
    with pytest.raises(UserError, match=r"variant bad.*unknown key key_dmi: did you mean key_dim"):
        read_methods([tmp_path / "variants.toml"])
    (tmp_path / "variants.toml").write_text('base = "nothing.toml"\n[variants.bad]\n')
    with pytest.raises(UserError, match="there is no config file"):
        read_methods([tmp_path / "variants.toml"])
    (tmp_path / "variants.toml").write_text('based = "base.toml"\n[variants.bad]\n')
    with pytest.raises(UserError, match="takes base, the name of a file"):
        read_methods([tmp_path / "variants.toml"])
