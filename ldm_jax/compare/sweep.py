"""Runs of many configs: what is missing is trained, a process for each run; what is finished is never run again."""

import contextlib
import fcntl
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ldm_jax.compare.runs import (
    FinishedRun,
    Run,
    diverged_run,
    finished_run,
    make_run,
    read_finished,
    store_methods,
    write_finished,
)
from ldm_jax.config import Config
from ldm_jax.config.toml import config_to_toml
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically

EXTENSIONS = 3
"""How often a grid of rates grows at an edge."""


class Sweep:
    """A folder of runs, with a row of `runs.csv` for each that is finished. One process at a time has the folder.

    A run is a process of `train_script`, on a share of the cores. Killed, it goes on from its checkpoint at the next
    start.
    """

    def __init__(self, folder: Path, train_script: Path, jobs: int, say: Callable[[str], None] = print):
        self.folder, self.train_script, self.jobs, self.say = folder, train_script, jobs, say
        self.file = folder / "runs.csv"
        self.finished = {(row.method, row.config_hash): row for row in read_finished(self.file)}

    def complete(self, runs: Sequence[Run]) -> list[FinishedRun]:
        """The rows of these runs, after those that are missing have been trained.

        Raises:
            UserError: a run failed other than by a loss that is not finite; or another process has the folder.
        """
        missing = [run for run in runs if (run.method, run.config_hash) not in self.finished]
        if missing:
            self.say(f"{len(runs)} runs, {len(missing)} of them to do, {self.jobs} at a time")
            try:
                with self._locked(), _stopped_by_terminate():
                    self._train(missing)
            except OSError as error:
                raise UserError(
                    f"{self.folder} cannot be written: {error.strerror}. What is finished is kept."
                ) from error
        return [self.finished[run.method, run.config_hash] for run in runs]

    def tune_and_repeat(
        self, methods: Mapping[str, Config], rates: Sequence[float], seeds: Sequence[int]
    ) -> dict[str, float]:
        """Finds each method's best rate on the first seed, trains it at that rate on all; returns the rates.

        Raises:
            UserError: rates or seeds that do not serve; otherwise as `complete`.
        """
        if self.jobs < 1:
            raise UserError(f"jobs is {self.jobs}, but it must be at least 1.")
        if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
            raise UserError(f"the seeds are {tuple(seeds)}, but there must be some, none negative and none twice.")
        if not rates or not 0 < min(rates) <= max(rates) < math.inf:
            raise UserError(f"the learning rates are {tuple(rates)}, but there must be some, positive and finite.")
        store_methods(self.folder, methods)
        best = self.tune(methods, rates, seeds[0]) if len(set(rates)) > 1 else dict.fromkeys(methods, rates[0])
        self.complete([make_run(method, methods[method], best[method], seed) for seed in seeds for method in methods])
        return best

    def tune(self, methods: Mapping[str, Config], rates: Sequence[float], seed: int) -> dict[str, float]:
        """The best learning rate of each method on one seed, by final validation loss.

        A grid whose best rate is at an edge grows there by the ratio of its first two rates, up to `EXTENSIONS` times.
        """
        best: dict[str, float] = {}
        grids = {method: sorted(set(rates)) for method in methods}
        first, second, *_ = sorted(set(rates))
        for extension in range(EXTENSIONS + 1):
            runs = [make_run(method, methods[method], rate, seed) for method, grid in grids.items() for rate in grid]
            rows = self.complete(runs)
            for method in methods:
                own = (row for row in rows if row.method == method)
                best[method] = min(own, key=lambda row: row.validation_loss).learning_rate
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

    def _train(self, runs: Sequence[Run]) -> None:
        cores: queue.SimpleQueue[set[int] | None] = queue.SimpleQueue()
        for share in _shares(self.jobs):
            cores.put(share)
        processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

        def train(run: Run) -> FinishedRun:
            share = cores.get()
            try:
                return self._train_one(run, share, processes)
            finally:
                cores.put(share)

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for done in as_completed([pool.submit(train, run) for run in runs]):
                    row = done.result()
                    self.finished[row.method, row.config_hash] = row
                    write_finished(self.file, list(self.finished.values()))
                    loss = "diverged" if row.diverged else f"validation loss {row.validation_loss:.4f} nats a token"
                    where = f"{row.method:<20} rate {row.learning_rate:g} seed {row.seed}"
                    self.say(f"{where}: {loss}, {row.seconds:.0f} s")
            except BaseException:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(processes):
                    process.terminate()
                raise

    def _train_one(self, run: Run, cores: set[int] | None, processes: set["subprocess.Popen[bytes]"]) -> FinishedRun:
        folder, log = self.folder / "runs" / run.name, self.folder / "runs" / f"{run.name}.log"
        config = log.with_suffix(".toml")
        log.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(config, config_to_toml(run.config))
        command = [sys.executable, str(self.train_script), str(config), "--run", str(folder)]
        while not self._stopped:
            with log.open("wb") as output:
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            processes.add(process)
            if self._stopped:  # since the question above
                process.terminate()
            if cores is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(process.pid, cores)
            status = process.wait()
            processes.discard(process)
            last = (log.read_text(errors="replace").splitlines() or [""])[-1]
            if status == 0:
                return finished_run(run, folder)
            if "so the run stops" in last:
                return diverged_run(run)
            if "another process is training" not in last:
                raise UserError(f"the run {run.name} failed ({last or f'status {status}'}): see {log}.")
            time.sleep(5)  # a run that outlived the comparison which had started it
        raise UserError("the comparison was stopped.")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another comparison is running in {self.folder}: wait for it.") from None
            yield


@contextlib.contextmanager
def _stopped_by_terminate() -> Iterator[None]:
    """SIGTERM is as Ctrl-C, so that the runs are ended with the comparison."""
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


def _shares(jobs: int) -> list[set[int] | None]:
    """The cores of each job; None where the system does not say, or there are too few."""
    if not hasattr(os, "sched_setaffinity"):
        return [None] * jobs
    cores = sorted(os.sched_getaffinity(0))
    return [set(cores[job::jobs]) or None for job in range(jobs)]
