"""What a comparison would train, and about how long that takes."""

import datetime
import math
import statistics
from collections.abc import Mapping, Sequence

from ldm_jax.compare.costs import read_costs, timed_steps
from ldm_jax.compare.runs import Run, check_directory, make_run, read_runs
from ldm_jax.compare.sweep import EXTENSIONS, Sweep, extended_grid
from ldm_jax.config import Config


def missing_runs(
    sweep: Sweep, methods: Mapping[str, Config], rates: Sequence[float], seeds: Sequence[int]
) -> list[Run]:
    """The runs that `Sweep.tune_and_repeat` would train, as far as the finished ones decide them.

    The rate of a method's other seeds is the best one that is known by now.

    Raises:
        UserError: as `Sweep.tune_and_repeat`.
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
    total = 0.0
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
            seconds = step * config.train.steps
            source = f"{config.train.steps} steps of {step:.3g} s; compilation and validation come on top"
            total += len(runs) * seconds  # the steps were timed on all cores, which the jobs share
        rates_of_seeds = ", ".join(f"{run.config.optimizer.learning_rate:g}/{run.config.train.seed}" for run in runs)
        sweep.say(
            f"{method}: {len(runs)} to train (rate/seed {rates_of_seeds}), each about {_time(seconds)} ({source})"
        )
    sweep.say(f"{len(missing)} to train in all, {sweep.jobs} at a time: about {_time(total)}")
    if len(set(rates)) > 1 and missing:
        sweep.say(
            f"A grid whose best rate is at its edge is extended by up to {EXTENSIONS} rates. "
            "The other seeds are trained at a method's best rate."
        )


def _time(seconds: float) -> str:
    return str(datetime.timedelta(seconds=math.ceil(seconds)))
