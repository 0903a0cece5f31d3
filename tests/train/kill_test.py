"""Whether a run that is killed again and again ends with the bits of one that never was."""

import collections
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from ldm_jax.errors import UserError
from ldm_jax.train import load_run
from ldm_jax.train.metrics import read_metrics

PHASES = ("startup", "compilation", "step", "save")
LONGEST_WAIT = 300.0
"""Seconds for a phase to come."""
MOST_STEPS = 8
"""That a run is let go on before it is killed in a step or a save."""
LONGEST_DELAY = {"startup": 2.0, "compilation": 2.0, "step": 0.05}
"""Seconds into a phase. A save is over in milliseconds."""


class Kill(NamedTuple):
    """One of them."""

    phase: str
    """In which the run was, as seen from outside just before."""
    step: int
    """The last one that it had logged since its start; 0 if none."""


class KillTest:
    """Runs of one config in a folder: `whole`, never killed, and `broken`."""

    def __init__(self, train_script: Path, config: Path, folder: Path):
        self._command = [sys.executable, str(train_script), str(config), "--run"]
        self.whole, self.broken, self._log = folder / "whole", folder / "broken", folder / "log.txt"
        if self.broken.exists():
            raise UserError(f"{self.broken} exists: give another --out, so that the run is killed from its start on.")
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, kills: int, seed: int, say: Callable[[str], None] = print) -> list[Kill]:
        """Trains both; kills one so many times by SIGKILL, in turn in each phase, at random moments."""
        draw = random.Random(seed)
        self._finish(self.whole)
        done = []
        for number in range(kills):
            kill = self._kill_one(PHASES[number % len(PHASES)], draw)
            if kill is None:
                break
            done.append(kill)
            place = f"after step {kill.step}" if kill.step else "before its first step"
            say(f"kill {number + 1:>3}: {kill.phase:<11} {place}")
        self._finish(self.broken)
        return done

    def differences(self) -> list[str]:
        """What is not the same in both, in phrases."""
        found = []
        a, b = load_run(self.whole), load_run(self.broken)
        leaves = zip(jax.tree_util.tree_leaves_with_path(a.params), jax.tree.leaves(b.params), strict=True)
        found += [f"parameter {jax.tree_util.keystr(path)}" for (path, x), y in leaves if not np.array_equal(x, y)]
        losses, others = (self._losses(folder) for folder in (self.whole, self.broken))
        found += [f"{name} at step {step}" for step, name in losses.keys() ^ others.keys()]
        found += [f"{name} at step {step}" for (step, name), x in losses.items() if x != others.get((step, name), x)]
        return found

    @staticmethod
    def _losses(run: Path) -> dict[tuple[int, str], float]:
        rows = read_metrics(run / "metrics.jsonl")
        return {(row["step"], name): row[name] for row in rows for name in ("loss", "validation_loss") if name in row}

    def _start(self, run: Path) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            return subprocess.Popen([*self._command, str(run)], stdout=log, stderr=subprocess.STDOUT)

    def _finish(self, run: Path) -> None:
        if self._start(run).wait() != 0:
            raise UserError(f"the run {run} failed: see {self._log}.")

    def _kill_one(self, wanted: str, draw: random.Random) -> Kill | None:
        """None: the run ended before its kill."""
        process = self._start(self.broken)
        steps = draw.randint(1, MOST_STEPS) if wanted in ("step", "save") else 0
        end = time.monotonic() + LONGEST_WAIT
        while process.poll() is None and time.monotonic() < end:
            if self._phase() == wanted and len(self._steps()) >= steps:
                break
            time.sleep(0.0005)
        if wanted in LONGEST_DELAY:
            time.sleep(draw.random() * LONGEST_DELAY[wanted])
        phase, done = self._phase(), self._steps()
        process.send_signal(signal.SIGKILL)
        return Kill(phase, done[-1] if done else 0) if process.wait() == -signal.SIGKILL else None

    def _phase(self) -> str:
        if any((self.broken / "checkpoints").glob("*.orbax-checkpoint-tmp")):
            return "save"
        if b"\nrun  " not in self._log.read_bytes():
            return "startup"
        return "step" if self._steps() else "compilation"

    def _steps(self) -> list[int]:
        """Those that the running process has logged."""
        return [int(step) for step in re.findall(rb"(?m)^step +(\d+)/", self._log.read_bytes())]


def histogram(kills: list[Kill]) -> str:
    """A line for each phase, with a bar as long as its number of kills."""
    counts = collections.Counter(kill.phase for kill in kills)
    return "\n".join(f"{phase:<12} {counts[phase]:>3} {'#' * counts[phase]}" for phase in PHASES)
