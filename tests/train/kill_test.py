"""Kills a run many times and compares it with one that is never killed.

    python tests/train/kill_test.py configs/tiny.toml [--kills 50] [--seed 0] [--out DIR]

Exit status 1: the two runs differ.
"""

import collections
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tyro

from ldm_jax.config.command_line import parse, run_script
from ldm_jax.errors import UserError
from ldm_jax.infer import load_model
from ldm_jax.train.metrics import read_metrics

TRAIN = Path(__file__).parents[2] / "scripts" / "train.py"
PHASES = ("startup", "compilation", "step", "save")
PHASE_TIMEOUT = 300.0
"""Seconds to wait for a phase."""
MAX_STEPS = 8
"""Most steps that a run makes before it is killed in a step or a save."""
MAX_DELAY = {"startup": 2.0, "compilation": 2.0, "step": 0.05}
"""Most seconds that a run spends in a phase before it is killed. A save takes milliseconds, so it has no delay."""


class Kill(NamedTuple):
    """A kill of a run."""

    phase: str
    """Phase of the run just before, as far as it can be seen from outside."""
    step: int
    """Last step that was logged since the start; 0 for none."""


class KillTest:
    """Two runs of one config in a directory: `whole`, which is never killed, and `killed`."""

    def __init__(self, config: Path, directory: Path):
        self._command = [sys.executable, str(TRAIN), str(config), "--run"]
        self.whole, self.killed, self._log = directory / "whole", directory / "killed", directory / "log.txt"
        if self.killed.exists():
            raise UserError(f"{self.killed} exists: give another --out, so that the run is killed from its start on.")
        directory.mkdir(parents=True, exist_ok=True)

    def run(self, kills: int, seed: int) -> list[Kill]:
        """Trains both runs; kills one by SIGKILL at random moments, in each phase in turn."""
        rng = random.Random(seed)
        self._finish(self.whole)
        done: list[Kill] = []
        while len(done) < kills and (kill := self._kill(PHASES[len(done) % len(PHASES)], rng)) is not None:
            done.append(kill)
            when = f"after step {kill.step}" if kill.step else "before its first step"
            print(f"kill {len(done):>3}: {kill.phase:<11} {when}")
        self._finish(self.killed)
        return done

    def differences(self) -> list[str]:
        """What differs between the two runs, in phrases."""
        a, b = load_model(self.whole), load_model(self.killed)
        leaves = zip(jax.tree_util.tree_leaves_with_path(a.params), jax.tree.leaves(b.params), strict=True)
        found = [f"parameter {jax.tree_util.keystr(path)}" for (path, x), y in leaves if not np.array_equal(x, y)]
        losses, others = _losses(self.whole), _losses(self.killed)
        names = sorted(losses.keys() | others.keys())
        return found + [
            f"{name} at step {step}" for step, name in names if losses.get((step, name)) != others.get((step, name))
        ]

    def _start(self, run: Path) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            return subprocess.Popen([*self._command, str(run)], stdout=log, stderr=subprocess.STDOUT)

    def _finish(self, run: Path) -> None:
        if self._start(run).wait() != 0:
            raise UserError(f"the run {run} failed: see {self._log}.")

    def _kill(self, phase: str, rng: random.Random) -> Kill | None:
        """Starts the run and kills it in a phase; None if it finishes before."""
        process = self._start(self.killed)
        steps = rng.randint(1, MAX_STEPS) if phase in ("step", "save") else 0
        end = time.monotonic() + PHASE_TIMEOUT
        while process.poll() is None and time.monotonic() < end:
            if self._phase() == phase and len(self._steps()) >= steps:
                break
            time.sleep(0.0005)
        if phase in MAX_DELAY:
            time.sleep(rng.random() * MAX_DELAY[phase])
        found, logged = self._phase(), self._steps()
        process.send_signal(signal.SIGKILL)
        return Kill(found, logged[-1] if logged else 0) if process.wait() == -signal.SIGKILL else None

    def _phase(self) -> str:
        if any((self.killed / "checkpoints").glob("*.orbax-checkpoint-tmp")):
            return "save"
        if b"\nrun  " not in self._log.read_bytes():
            return "startup"
        return "step" if self._steps() else "compilation"

    def _steps(self) -> list[int]:
        """Steps that the current process has logged."""
        return [int(step) for step in re.findall(rb"(?m)^step +(\d+)/", self._log.read_bytes())]


def _losses(run: Path) -> dict[tuple[int, str], float]:
    rows = read_metrics(run / "metrics.jsonl")
    return {(row["step"], name): row[name] for row in rows for name in ("loss", "validation_loss") if name in row}


def histogram(kills: list[Kill]) -> str:
    """A line for each phase, with a bar as long as its number of kills."""
    counts = collections.Counter(kill.phase for kill in kills)
    return "\n".join(f"{phase:<12} {counts[phase]:>3} {'#' * counts[phase]}" for phase in PHASES)


@dataclass(frozen=True)
class Arguments:
    """Compares a run that is killed at random moments with one that is never killed. Exit status 1: they differ."""

    config: tyro.conf.Positional[Path]
    """TOML file of a run with many checkpoints."""
    kills: int = 50
    """Number of kills, in turn during startup, compilation, steps and saves."""
    seed: int = 0
    """Seed of the random moments."""
    out: Path = Path("runs/kill_test")
    """Directory of both runs."""


def main() -> None:
    """Parses the command line, kills, and compares."""
    arguments = parse(Arguments)
    test = KillTest(arguments.config, arguments.out)
    kills = test.run(arguments.kills, arguments.seed)
    print(f"\n{len(kills)} kills by phase:\n{histogram(kills)}")
    differences = test.differences()
    if differences:
        print(f"{len(differences)} differences: {', '.join(differences[:5])}")
        sys.exit(1)
    print("the final parameters and all losses are the same to the bit")


if __name__ == "__main__":
    run_script(main)
