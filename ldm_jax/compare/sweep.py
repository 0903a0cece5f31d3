"""Sweeps over learning rates and seeds: each missing run is trained in its own process, finished runs are kept."""

import contextlib
import fcntl
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ldm_jax.compare.runs import (
    Key,
    Run,
    RunResult,
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


class Sweep:
    """Trains the runs of a comparison in a directory, which holds a row of `runs.csv` for each finished run.

    A run is a process of `train_script` on its share of the cores. If the sweep is killed, the next one resumes the
    unfinished runs from their checkpoints. One process at a time uses the directory.
    """

    def __init__(self, directory: Path, train_script: Path, jobs: int, say: Callable[[str], None] = print):
        self.directory, self.train_script, self.jobs, self.say = directory, train_script, jobs, say
        self.file = directory / "runs.csv"
        self._stopped = False

    def complete(self, runs: Sequence[Run]) -> list[RunResult]:
        """Trains the runs that are missing; returns the results of all.

        Raises:
            UserError: a run failed otherwise than by diverging; the directory holds runs of a method of the same name
                with another config, cannot be written, or is in use.
        """
        try:
            with self._locked() as lock, _terminate_as_interrupt():
                finished = {result.key: result for result in read_runs(self.file)}
                self._check_configs(runs, finished)
                if missing := [run for run in runs if run.key not in finished]:
                    self.say(f"{len(runs)} runs, {len(missing)} of them to do, {self.jobs} at a time")
                    self._train(missing, finished, lock)
        except OSError as error:
            raise UserError(f"{self.directory} cannot be written: {error.strerror}. Finished runs are kept.") from error
        return [finished[run.key] for run in runs]

    def tune_and_repeat(
        self, methods: Mapping[str, Config], rates: Sequence[float], seeds: Sequence[int]
    ) -> dict[str, float]:
        """Tunes each method's learning rate on the first seed, then trains it at the best rate on all seeds.

        Returns:
            The best rate of each method.

        Raises:
            UserError: inadmissible rates or seeds; otherwise as `complete`.
        """
        if self.jobs < 1:
            raise UserError(f"jobs is {self.jobs}, but it must be at least 1.")
        if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
            raise UserError(f"the seeds are {tuple(seeds)}, but there must be some, none negative and none twice.")
        if not rates or not 0 < min(rates) <= max(rates) < math.inf:
            raise UserError(f"the learning rates are {tuple(rates)}, but there must be some, positive and finite.")
        best = self.tune(methods, rates, seeds[0]) if len(set(rates)) > 1 else dict.fromkeys(methods, rates[0])
        self.complete([make_run(method, methods[method], best[method], seed) for seed in seeds for method in methods])
        return best

    def tune(self, methods: Mapping[str, Config], rates: Sequence[float], seed: int) -> dict[str, float]:
        """The best learning rate of each method on one seed, by final validation loss.

        A grid whose best rate is at an edge is extended there by the ratio of its two lowest rates, up to `EXTENSIONS`
        times.
        """
        best: dict[str, float] = {}
        grids = {method: sorted(set(rates)) for method in methods}
        first, second, *_ = sorted(set(rates))
        for extension in range(EXTENSIONS + 1):
            runs = [make_run(method, methods[method], rate, seed) for method, grid in grids.items() for rate in grid]
            results = self.complete(runs)
            for method in methods:
                own = (result for result in results if result.method == method)
                best[method] = min(own, key=lambda result: result.validation_loss).learning_rate
            at_edge = [method for method, grid in grids.items() if best[method] in (grid[0], grid[-1])]
            if not at_edge:
                break
            self.say(f"the best rate is at the edge of the grid: {', '.join(at_edge)}")
            if extension == EXTENSIONS:
                break
            for method in at_edge:
                grid, ratio = grids[method], second / first
                low = best[method] == grid[0]
                grids[method] = [_rounded(grid[0] / ratio), *grid] if low else [*grid, _rounded(grid[-1] * ratio)]
        self.say("best rates: " + ", ".join(f"{method} {rate:g}" for method, rate in best.items()))
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

    def _train(self, runs: Sequence[Run], finished: dict[Key, RunResult], lock: int) -> None:
        """Trains the runs and adds their results to `finished` and to the file."""
        cores: queue.SimpleQueue[set[int] | None] = queue.SimpleQueue()
        for share in _core_shares(self.jobs):
            cores.put(share)
        processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

        def train(run: Run) -> RunResult:
            share = cores.get()
            try:
                return self._train_one(run, share, processes, lock)
            finally:
                cores.put(share)

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for done in as_completed([pool.submit(train, run) for run in runs]):
                    result = done.result()
                    finished[result.key] = result
                    write_runs(self.file, list(finished.values()))
                    end = f"validation loss {result.validation_loss:.4f} nats per token, {result.seconds:.0f} s"
                    where = f"{result.method:<20} rate {result.learning_rate:g} seed {result.seed}"
                    self.say(f"{where}: {'diverged' if result.diverged else end}")
            except BaseException:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(processes):
                    process.terminate()
                raise

    def _train_one(
        self, run: Run, cores: set[int] | None, processes: set["subprocess.Popen[bytes]"], lock: int
    ) -> RunResult:
        directory, log = self.directory / "runs" / run.name, self.directory / "runs" / f"{run.name}.log"
        config = log.with_suffix(".toml")
        log.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(config, config_to_toml(run.config))
        command = [sys.executable, str(self.train_script), str(config), "--run", str(directory)]
        if self._stopped:
            raise UserError("the comparison was stopped.")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, pass_fds=(lock,))
        processes.add(process)
        if self._stopped:  # set since it was checked above
            process.terminate()
        if cores is not None:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, cores)
        status = process.wait()
        processes.discard(process)
        if status == 0:
            return finished_result(run, directory)
        if status == DIVERGED_STATUS:
            return diverged_result(run)
        last = (log.read_text(errors="replace").splitlines() or [""])[-1]
        raise UserError(f"the run {run.name} failed ({last or f'status {status}'}): see {log}.")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Holds the directory's lock. Runs inherit it, so that those which outlive a killed sweep still hold it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another comparison, or a run that it started, is using {self.directory}: wait for it."
                ) from None
            yield lock.fileno()


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


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


def _core_shares(jobs: int) -> list[set[int] | None]:
    """The cores of each job; None where they are unknown, or fewer than the jobs."""
    if not hasattr(os, "sched_setaffinity"):
        return [None] * jobs
    cores = sorted(os.sched_getaffinity(0))
    return [set(cores[job::jobs]) or None for job in range(jobs)]
