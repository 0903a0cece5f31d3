"""The table of a comparison: a row for each method, from its runs and its costs, as CSV and as Markdown."""

import csv
import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # scipy.stats takes a second to import

from ldm_jax.compare.costs import MethodCosts, read_costs
from ldm_jax.compare.runs import RunResult, check_directory, read_runs
from ldm_jax.config.command_line import has_matplotlib
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically, writing

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
    half_width = stdtrit(count - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(count)
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
    tuned: bool
    """Whether the rate was chosen among several."""

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
        tried = {run.learning_rate for run in runs if run.method == method}
        rows.append(MethodResult(method, own, costs.get(method), ratio, differences, len(tried) > 1))
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
    """The table in Markdown, with a legend. Without costs of any method, it has no columns for them."""
    with_costs = any(row.costs is not None for row in rows)
    names = ["method", "rate", "seeds", "validation loss", f"minus {baseline}, same seeds"]
    if with_costs:
        names[1:1] = ["parameters (mixer)", "kflop a token", "memory, MiB", f"step / {baseline}"]
    lines = [names, len(names) * ["---"]]
    for row in rows:
        costs, ratio, difference = row.costs, row.step_over_baseline, ""
        if row.difference is not None and row.method != baseline:
            covers = row.difference.seeds > 1 and row.difference.covers_zero
            difference = _with_interval(row.difference, sign="+") + (", covers 0" if covers else "")
        cells = [row.method, f"{row.learning_rate:g}", str(len(row.runs)), _with_interval(row.loss), difference]
        if with_costs:
            cells[1:1] = (
                [
                    f"{costs.parameters:,} ({costs.mixer_parameters:,})",
                    f"{costs.flops_per_token / 1e3:,.0f}",
                    f"{costs.temporary_bytes / 2**20:,.0f}",
                    "" if ratio is None else f"{ratio:.2f}",
                ]
                if costs is not None
                else 4 * [""]
            )
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{_legend(rows, with_costs)}\n"


def _legend(rows: Sequence[MethodResult], with_costs: bool) -> str:
    text = "Loss: final loss on held-out text in nats per token; mean over seeds and 95 % Student interval."
    if untuned := [row.method for row in rows if not row.tuned]:
        text += " The rate was not tuned" + ("." if len(untuned) == len(rows) else f" for {', '.join(untuned)}.")
    if len(untuned) < len(rows):
        text += " The rate was chosen on the first seed, whose loss is therefore the lowest of several."
    if with_costs:
        text += (
            " Flops and memory: of loss and gradient, without the optimizer; memory beside parameters and gradients; "
            "mHC's Sinkhorn iterations count once. Step: time of a training step on the machine that measured "
            "costs.json, the methods alternating."
        )
    return textwrap.fill(text, 120)


def _with_interval(value: Mean, sign: str = "") -> str:
    if not math.isfinite(value.mean):
        return "diverged"
    interval = f" ± {value.half_width:.4f}" if value.seeds > 1 else ""
    return f"{value.mean:{sign}.4f}{interval}"


def report(directory: Path, baseline: str = BASELINE, out: Path | None = None) -> None:
    """Prints the table of the comparison in a directory, from its `runs.csv` and `costs.json`.

    Args:
        directory: directory of the comparison. Without `costs.json` the costs are left out.
        baseline: method whose loss and step time the others are compared with.
        out: directory to write `results.csv`, `results.md` and, with matplotlib, the plots to.

    Raises:
        UserError: a file cannot be written, or `out` holds other files; there is no finished run, or no such baseline.
    """
    runs = read_runs(directory / "runs.csv")
    if not runs:
        raise UserError(f"{directory} has no finished run: give the directory of a comparison (--out of compare.py).")
    check_baseline(baseline, dict.fromkeys(run.method for run in runs))
    rows = results(runs, read_costs(directory), baseline)
    table = markdown(rows, baseline)
    print(table)
    if out is None:
        return
    check_directory(out)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_csv(rows, out / "results.csv")
        write_atomically(out / "results.md", table)
    files = [out / "results.csv", out / "results.md"]
    if has_matplotlib():
        from ldm_jax.compare.plots import plot_comparison

        files += plot_comparison(rows, out)
    else:
        print("no plots are drawn: they need matplotlib (pip install -e '.[plot]')")
    for file in files:
        print(file)
