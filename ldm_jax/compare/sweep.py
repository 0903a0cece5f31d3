"""Sweeps over learning rates and seeds: each missing run is trained in its own process, finished runs are kept.

Also what a sweep would train, and about how long that takes.
"""

import contextlib
import datetime
import fcntl
import math
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO

from ldm_jax.compare import child
from ldm_jax.compare.costs import read_costs, timed_steps
from ldm_jax.compare.runs import (
    Key,
    Run,
    RunResult,
    check_directory,
    diverged_result,
    finished_result,
    make_run,
    read_runs,
    write_runs,
)
from ldm_jax.config import Config
from ldm_jax.config.command_line import DIVERGED_STATUS
from ldm_jax.config.toml import config_to_toml
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically

EXTENSIONS = 3
"""How often a grid of rates is extended at an edge."""
PROGRESS_SECONDS = 60.0
"""Time between two lines about a run that is being trained."""


class Sweep:
    """Trains the runs of a comparison in a directory, which holds a row of `runs.csv` for each finished run.

    A run is a process of `train_script` on its share of the cores. It ends with the sweep, after saving a checkpoint,
    and the next sweep resumes it. One sweep at a time uses the directory; another one waits.
    """

    def __init__(self, directory: Path, train_script: Path, jobs: int, say: Callable[[str], None] = print):
        self.directory, self.train_script, self.jobs, self.say = directory, train_script, jobs, say
        self.file = directory / "runs.csv"
        self._stopped = False

    def complete(self, runs: Sequence[Run]) -> list[RunResult]:
        """Trains the runs that are missing; returns the results of all.

        Raises:
            UserError: a run failed otherwise than by diverging; the directory holds other files, or runs of a method of
                the same name with another config, or cannot be written.
        """
        check_directory(self.directory)
        try:
            with self._locked(), _terminate_as_interrupt():
                finished = self.finished(runs)
                if missing := [run for run in runs if run.key not in finished]:
                    count = f"{len(runs)} run" + "s" * (len(runs) != 1)
                    done = len(runs) - len(missing)
                    self.say(f"{count}: {done} finished, {len(missing)} to train, {self.jobs} at a time")
                    self._train(missing, finished)
        except OSError as error:
            raise UserError(f"{self.directory} cannot be written: {error.strerror}. Finished runs are kept.") from error
        return [finished[run.key] for run in runs]

    def finished(self, runs: Sequence[Run]) -> dict[Key, RunResult]:
        """The results in the directory. Raises UserError if a method's are those of another config than its runs'."""
        finished = {result.key: result for result in read_runs(self.file)}
        self._check_configs(runs, finished)
        return finished

    def tune_and_repeat(
        self, methods: Mapping[str, Config], rates: Sequence[float], seeds: Sequence[int]
    ) -> dict[str, float]:
        """Tunes each method's learning rate on the first seed, then trains it at the best rate on all seeds.

        Returns the best rate of each method. Raises UserError as `check_plan` and `complete`.
        """
        self.check_plan(methods, rates, seeds)
        best = self.tune(methods, rates, seeds[0]) if len(set(rates)) > 1 else dict.fromkeys(methods, rates[0])
        self.complete([make_run(method, methods[method], best[method], seed) for seed in seeds for method in methods])
        return best

    def check_plan(self, methods: Mapping[str, Config], rates: Sequence[float], seeds: Sequence[int]) -> None:
        """Raises UserError for inadmissible jobs, rates or seeds, and for runs that would share their checkpoints."""
        if self.jobs < 1:
            raise UserError(f"jobs is {self.jobs}, but it must be at least 1.")
        if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
            raise UserError(f"the seeds are {tuple(seeds)}, but there must be some, none negative and none twice.")
        if not rates or not 0 < min(rates) <= max(rates) < math.inf:
            raise UserError(f"the learning rates are {tuple(rates)}, but there must be some, positive and finite.")
        for method, config in methods.items():
            if config.train.checkpoints is not None:
                raise UserError(
                    f"train.checkpoints of {method} is {config.train.checkpoints}, which its runs would share: omit it."
                )

    def tune(self, methods: Mapping[str, Config], rates: Sequence[float], seed: int) -> dict[str, float]:
        """The best learning rate of each method on one seed, by final validation loss.

        A grid whose best rate is at an edge is extended there by the ratio of its two lowest rates, up to `EXTENSIONS`
        times.
        """
        grids = {method: sorted(set(rates)) for method in methods}
        while True:
            runs = [make_run(method, methods[method], rate, seed) for method, grid in grids.items() for rate in grid]
            losses = {result.key: result.validation_loss for result in self.complete(runs)}
            wider = {
                method: extended_grid(rates, {rate: losses[method, rate, seed] for rate in grid})
                for method, grid in grids.items()
            }
            if wider == grids:
                break
            self.say(
                "the best rate is at the edge of the grid, which is extended: "
                + ", ".join(method for method in methods if wider[method] != grids[method])
            )
            grids = wider
        best = {method: min(grid, key=lambda rate: losses[method, rate, seed]) for method, grid in grids.items()}
        self.say("best rates: " + ", ".join(f"{method} {rate:g}" for method, rate in best.items()))
        if at_edge := [method for method, grid in grids.items() if best[method] in (grid[0], grid[-1])]:
            self.say(
                f"the best rate is still at the edge of the grid after {EXTENSIONS} extensions: {', '.join(at_edge)}"
            )
        return best

    def _check_configs(self, runs: Sequence[Run], finished: Mapping[Key, RunResult]) -> None:
        hashes = {result.method: result.config_hash for result in finished.values()}
        for run in runs:
            if hashes.get(run.method, run.config_hash) != run.config_hash:
                raise UserError(
                    f"{self.directory} holds runs of {run.method} with another config (hash {hashes[run.method]}, but "
                    f"the config given has {run.config_hash}): rename the config's file or variant, or give another "
                    "--out."
                )

    def _train(self, runs: Sequence[Run], finished: dict[Key, RunResult]) -> None:
        """Trains the runs and adds their results to `finished` and to the file."""
        cores: queue.SimpleQueue[set[int] | None] = queue.SimpleQueue()
        for share in _core_shares(self.jobs):
            cores.put(share)
        processes: set[subprocess.Popen[bytes]] = set()

        def train(run: Run) -> RunResult:
            share = cores.get()
            try:
                return self._train_one(run, share, processes)
            finally:
                cores.put(share)

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for done in as_completed([pool.submit(train, run) for run in runs]):
                    result = done.result()
                    finished[result.key] = result
                    write_runs(self.file, list(finished.values()))
                    end = f"validation loss {result.validation_loss:.4f} nats per token, {result.seconds:.0f} s"
                    self.say(f"{_label(*result.key)}: {'diverged' if result.diverged else end}")
            except BaseException:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(processes):
                    process.terminate()
                raise

    def _train_one(self, run: Run, cores: set[int] | None, processes: set["subprocess.Popen[bytes]"]) -> RunResult:
        directory, log = self.directory / "runs" / run.name, self.directory / "runs" / f"{run.name}.log"
        config, label = log.with_suffix(".toml"), _label(*run.key)
        log.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(config, config_to_toml(run.config))
        if (directory / ".lock").exists():
            with (directory / ".lock").open("r+") as lock:
                self._wait_for(lock, f"{label}: waiting for another process, which is training it")
        command = [sys.executable, child.__file__, str(self.train_script), str(config), "--run", str(directory)]
        if self._stopped:
            raise UserError("the comparison was stopped.")
        self.say(f"{label}: training, see {log}")
        with log.open("ab") as output:
            begin = output.tell()  # the file may have the lines of an earlier start
            # Ctrl-C in a terminal goes to its whole process group. In another one, a run is stopped by the sweep only.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        processes.add(process)
        if self._stopped:  # set since it was checked above
            process.terminate()
        if cores is not None:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, cores)
        with process:  # closes the standard input after the process has ended
            status = self._wait(process, log, begin, label)
        processes.discard(process)
        if status == 0:
            return finished_result(run, directory)
        if status == DIVERGED_STATUS:
            return diverged_result(run)
        last = _last_line(log, begin) or f"status {status}"
        raise UserError(f"the run {run.name} failed ({last}): see {log}.")

    def _wait(self, process: "subprocess.Popen[bytes]", log: Path, begin: int, label: str) -> int:
        """Waits for a run; from time to time, prints the last line of its log. Returns its exit status."""
        while True:
            try:
                return process.wait(PROGRESS_SECONDS)
            except subprocess.TimeoutExpired:
                self.say(f"{label}: {_last_line(log, begin) or 'starting'}")

    def _wait_for(self, lock: IO[str], why: str) -> None:
        """Waits until no other process holds the lock of this file; takes it."""
        said = False
        while not self._stopped:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not said:
                    self.say(why)
                said = True
                time.sleep(0.5)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the directory's lock."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._stopped = False
        with (self.directory / ".lock").open("w") as lock:
            self._wait_for(lock, f"waiting for another comparison, which is using {self.directory}")
            yield


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C, so that the runs are stopped with the sweep."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def extended_grid(rates: Sequence[float], losses: Mapping[float, float]) -> list[float]:
    """The grid of a method's rates, extended at the edge where the best rate is, as far as it is known by now.

    Tuning starts from `rates`, at least two. Losses at rates that are not in the grid so far are ignored.
    """
    grid = sorted(set(rates))
    ratio = grid[1] / grid[0]
    for _ in range(EXTENSIONS):
        if not losses.keys() >= set(grid):
            break
        best = min(grid, key=lambda rate: losses[rate])
        if best == grid[0]:
            grid = [_rounded(grid[0] / ratio), *grid]
        elif best == grid[-1]:
            grid = [*grid, _rounded(grid[-1] * ratio)]
    return grid


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


def _label(method: str, rate: float, seed: int) -> str:
    return f"{method:<20} rate {rate:g} seed {seed}"


def _last_line(log: Path, begin: int) -> str:
    """The last line of the log from byte `begin` on."""
    lines = log.read_bytes()[begin:].decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _core_shares(jobs: int) -> list[set[int] | None]:
    """The cores of each job; None where they are unknown, or fewer than the jobs."""
    if not hasattr(os, "sched_setaffinity"):
        return [None] * jobs
    cores = sorted(os.sched_getaffinity(0))
    return [set(cores[job::jobs]) or None for job in range(jobs)]


def missing_runs(
    sweep: Sweep, methods: Mapping[str, Config], rates: Sequence[float], seeds: Sequence[int]
) -> list[Run]:
    """The runs that `Sweep.tune_and_repeat` would train, as far as the finished ones decide them.

    The rate of a method's other seeds is the best known by now. Raises UserError as `Sweep.tune_and_repeat`.
    """
    sweep.check_plan(methods, rates, seeds)
    check_directory(sweep.directory)
    first, *others = seeds
    finished = sweep.finished([make_run(method, config, rates[0], first) for method, config in methods.items()])
    runs = []
    for method, config in methods.items():
        losses = {
            rate: result.validation_loss
            for (name, rate, seed), result in finished.items()
            if (name, seed) == (method, first)
        }
        grid = extended_grid(rates, losses) if len(set(rates)) > 1 else list(rates[:1])
        best = min(grid, key=lambda rate: losses.get(rate, math.inf))
        runs += [make_run(method, config, rate, first) for rate in grid]
        runs += [make_run(method, config, best, seed) for seed in others]
    return [run for run in runs if run.key not in finished]


def say_plan(sweep: Sweep, methods: Mapping[str, Config], rates: Sequence[float], seeds: Sequence[int]) -> None:
    """Says what would be trained, and for how long by finished runs, known costs or timed steps. Raises UserError."""
    missing = missing_runs(sweep, methods, rates, seeds)
    finished, costs = read_runs(sweep.file), read_costs(sweep.directory)
    total, on_top = 0.0, ""
    for method, config in methods.items():
        runs = [run for run in missing if run.method == method]
        if not runs:
            sweep.say(f"{method}: all runs are finished")
            continue
        known = [result.seconds for result in finished if result.method == method and not result.diverged]
        if known:
            seconds, source = statistics.median(known), "as its finished runs"
            total += len(runs) * seconds / sweep.jobs
        else:
            if method in costs and costs[method].config_hash == runs[0].config_hash:
                step = costs[method].step_seconds
            else:
                sweep.say(f"{method}: timing a few steps")
                (step,) = timed_steps([config], rounds=3, warm_up=1)
            seconds, on_top = step * config.train.steps, ", and compilation and validation on top"
            source = f"{config.train.steps} steps of {step:.3g} s; compilation and validation come on top"
            total += len(runs) * seconds  # the steps were timed on all cores, which the jobs share
        rates_of_seeds = ", ".join(f"{run.config.optimizer.learning_rate:g}/{run.config.train.seed}" for run in runs)
        sweep.say(
            f"{method}: {len(runs)} to train (rate/seed {rates_of_seeds}), each about {_time(seconds)} ({source})"
        )
    sweep.say(f"{len(missing)} to train in all, {sweep.jobs} at a time: about {_time(total)}{on_top}")
    if len(set(rates)) > 1 and missing:
        sweep.say(
            f"A grid whose best rate is at its edge is extended by up to {EXTENSIONS} rates. "
            "The other seeds are trained at a method's best rate."
        )


def _time(seconds: float) -> str:
    return str(datetime.timedelta(seconds=math.ceil(seconds)))
