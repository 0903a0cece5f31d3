"""The table of a comparison: a row for each method, from its runs and its costs, as CSV and as Markdown."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from ldm_jax.compare.costs import MethodCosts, read_costs
from ldm_jax.compare.runs import RunResult, read_runs
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically

BASELINE = "preln"
"""The baseline, unless another method is given."""


class Mean(NamedTuple):
    """A mean over seeds with its 95 % Student interval."""

    mean: float
    half_width: float
    """Infinite for a single value."""
    seeds: int

    @property
    def covers_zero(self) -> bool:
        """Whether 0 lies in the interval."""
        return abs(self.mean) <= self.half_width


def mean(values: Sequence[float]) -> Mean:
    """The mean and its interval, `mean +- t_{n-1} s / sqrt(n)`; infinite if a value is not finite."""
    count = len(values)
    if count < 2:
        return Mean(float(np.mean(values)), math.inf, count)
    if not np.all(np.isfinite(values)):
        return Mean(math.inf, math.nan, count)
    half_width = stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)
    return Mean(float(np.mean(values)), float(half_width), count)


@dataclass(frozen=True)
class MethodResult:
    """A method at its tuned learning rate."""

    method: str
    runs: tuple[RunResult, ...]
    """At that rate, one for each seed."""
    costs: MethodCosts | None
    step_over_baseline: float | None
    """Step time over that of the baseline."""
    differences: tuple[float, ...]
    """Validation loss minus the baseline's, for each seed that both have."""

    @property
    def learning_rate(self) -> float:
        """The tuned rate."""
        return self.runs[0].learning_rate

    @property
    def loss(self) -> Mean:
        """Final validation loss in nats per token."""
        return mean([run.validation_loss for run in self.runs])

    @property
    def difference(self) -> Mean | None:
        """Mean of the differences; None if no seed has both."""
        return mean(self.differences) if self.differences else None


def check_baseline(baseline: str, methods: Iterable[str]) -> None:
    """Raises UserError for a baseline that is not among the methods, unless it is the default."""
    if baseline != BASELINE and baseline not in methods:
        raise UserError(f"the baseline is {baseline}, but there is no such method: choose from {', '.join(methods)}.")


def results(
    runs: Sequence[RunResult], costs: Mapping[str, MethodCosts], baseline: str = BASELINE
) -> list[MethodResult]:
    """A row for each method, lowest loss first. A method's rate is the best on the seed that has the most rates.

    Costs that were measured for another config than that of the runs are left out.
    """
    hashes = {run.method: run.config_hash for run in runs}
    tuned = {method: _at_tuned_rate([run for run in runs if run.method == method]) for method in hashes}
    costs = {method: each for method, each in costs.items() if each.config_hash == hashes.get(method)}
    base_loss = {run.seed: run.validation_loss for run in tuned.get(baseline, ())}
    rows = []
    for method, own in tuned.items():
        both = method in costs and baseline in costs
        ratio = costs[method].step_seconds / costs[baseline].step_seconds if both else None
        differences = tuple(run.validation_loss - base_loss[run.seed] for run in own if run.seed in base_loss)
        rows.append(MethodResult(method, own, costs.get(method), ratio, differences))
    return sorted(rows, key=lambda row: row.loss.mean)


def _at_tuned_rate(runs: Sequence[RunResult]) -> tuple[RunResult, ...]:
    seeds = [run.seed for run in runs]
    tuning = max(dict.fromkeys(sorted(seeds)), key=seeds.count)
    best = min((run for run in runs if run.seed == tuning), key=lambda run: run.validation_loss).learning_rate
    return tuple(sorted((run for run in runs if run.learning_rate == best), key=lambda run: run.seed))


_COLUMNS = (
    "method", "parameters", "mixer_parameters", "flops_per_token", "temporary_bytes", "step_over_baseline",
    "learning_rate", "seeds", "validation_loss", "validation_loss_half_width", "difference", "difference_half_width",
    "differences",
)  # fmt: skip


def write_csv(rows: Sequence[MethodResult], file: Path) -> None:
    """Writes every figure of every method; half widths are those of 95 % Student intervals over seeds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in rows:
        costs, difference = row.costs, row.difference
        sizes = (
            (costs.parameters, costs.mixer_parameters, costs.flops_per_token, costs.temporary_bytes)
            if costs
            else 4 * ("",)
        )
        seeds = " ".join(str(run.seed) for run in row.runs)
        figures = (*row.loss[:2], *(difference[:2] if difference else ("", "")))
        differences = " ".join(f"{each:+.6f}" for each in row.differences)
        ratio = row.step_over_baseline or ""
        writer.writerow([row.method, *sizes, ratio, row.learning_rate, seeds, *figures, differences])
    write_atomically(file, text.getvalue())


def markdown(rows: Sequence[MethodResult], baseline: str = BASELINE) -> str:
    """The table in Markdown, with a legend."""
    lines = [
        f"| method | parameters (mixer) | kflop a token | memory, MiB | step / {baseline} | rate | seeds | "
        f"validation loss | minus {baseline}, same seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes, ratio, difference = "| | ", "", ""
        if row.costs is not None:
            costs = row.costs
            parameters = f"{costs.parameters:,} ({costs.mixer_parameters:,})"
            sizes = f"{parameters} | {costs.flops_per_token / 1e3:,.0f} | {costs.temporary_bytes / 2**20:,.0f}"
        if row.step_over_baseline is not None:
            ratio = f"{row.step_over_baseline:.2f}"
        if row.difference is not None and row.method != baseline:
            difference = _with_interval(row.difference, sign="+") + (", covers 0" if row.difference.covers_zero else "")
        rate, seeds = f"{row.learning_rate:g}", str(len(row.runs))
        cells = row.method, sizes, ratio, rate, seeds, _with_interval(row.loss), difference
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n" + LEGEND


LEGEND = """
Loss: final loss on held-out text in nats per token; mean over seeds and 95 % Student interval. The rate was chosen on
the first seed, whose loss is therefore the lowest of several. Flops and memory: of loss and gradient, without the
optimizer; memory beside parameters and gradients; mHC's Sinkhorn iterations count once. Step: time of a training step
on the machine that measured costs.json, the methods alternating.
"""


def _with_interval(value: Mean, sign: str = "") -> str:
    if not math.isfinite(value.mean):
        return "diverged"
    interval = f" ± {value.half_width:.4f}" if value.seeds > 1 else ""
    return f"{value.mean:{sign}.4f}{interval}"


def report(directory: Path, baseline: str = BASELINE) -> None:
    """Writes `results.csv`, `results.md` and the plots from `runs.csv` and `costs.json`, and prints the table.

    Without `costs.json` the costs are left out.

    Raises:
        UserError: a file cannot be written; there is no finished run, or no such baseline.
    """
    from ldm_jax.compare.plots import plot_comparison  # needs matplotlib

    runs = read_runs(directory / "runs.csv")
    if not runs:
        raise UserError(f"{directory} has no finished run: give the directory of a comparison (--out of compare.py).")
    check_baseline(baseline, dict.fromkeys(run.method for run in runs))
    rows = results(runs, read_costs(directory), baseline)
    table = markdown(rows, baseline)
    try:
        write_csv(rows, directory / "results.csv")
        write_atomically(directory / "results.md", table)
    except OSError as error:
        raise UserError(f"the results cannot be written to {directory}: {error.strerror}.") from error
    print(table)
    for file in [directory / "results.csv", directory / "results.md", *plot_comparison(rows, directory)]:
        print(file)
