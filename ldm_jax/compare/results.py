"""A comparison of methods: a row for each, from its finished runs and its costs; as CSV and as a Markdown table."""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ldm_jax.compare.costs import MethodCosts, measure
from ldm_jax.compare.runs import FinishedRun, make_run, read_finished
from ldm_jax.compare.statistics import Mean, mean
from ldm_jax.config import Config
from ldm_jax.errors import UserError
from ldm_jax.files import write_atomically

BASELINE = "preln"
"""What methods are compared with unless another is asked for."""


@dataclass(frozen=True)
class Result:
    """A method at its tuned rate."""

    method: str
    runs: tuple[FinishedRun, ...]
    """At that rate, one for each seed."""
    costs: MethodCosts | None
    step_over_baseline: float | None
    loss: Mean
    """Final validation loss, nats a token."""
    difference: Mean | None
    """To the baseline on the same seeds; None without one."""

    @property
    def learning_rate(self) -> float:
        """The tuned rate."""
        return self.runs[0].learning_rate


def check_baseline(baseline: str, methods: Mapping[str, Config]) -> None:
    """Raises UserError for a baseline that was asked for and is not there; without `preln` nothing is compared."""
    if baseline not in methods and baseline != BASELINE:
        raise UserError(f"the baseline is {baseline}, but there is no such method: choose from {', '.join(methods)}.")


def method_costs(folder: Path, methods: Mapping[str, Config]) -> dict[str, MethodCosts]:
    """The costs of the methods, measured together unless `costs.json` has them all already, from one measurement."""
    file = folder / "costs.json"
    hashes = {method: make_run(method, config, 0.1, 0).config_hash for method, config in methods.items()}
    stored = json.loads(file.read_text()) if file.exists() else {}
    if set(hashes.values()) - set(stored):
        stored = {hashes[method]: dataclasses.asdict(costs) for method, costs in measure(methods).items()}
        write_atomically(file, json.dumps(stored, indent=1) + "\n")
    return {method: MethodCosts(**stored[own]) for method, own in hashes.items()}


def results(
    folder: Path, methods: Mapping[str, Config], costs: Mapping[str, MethodCosts], baseline: str = BASELINE
) -> list[Result]:
    """A row for each method that has runs, best first. Rows of configs that have changed since are not looked at.

    A method's rate is the best on the seed that has most rates.
    """
    finished = read_finished(folder / "runs.csv")
    chosen = {method: _at_tuned_rate(method, config, finished) for method, config in methods.items()}
    base_loss = {run.seed: run.validation_loss for run in chosen.get(baseline, ())}
    rows = []
    for method, runs in chosen.items():
        if not runs:
            continue
        paired = [run.validation_loss - base_loss[run.seed] for run in runs if run.seed in base_loss]
        own, base = costs.get(method), costs.get(baseline)
        ratio = own.step_seconds / base.step_seconds if own and base else None
        loss = mean([run.validation_loss for run in runs])
        rows.append(Result(method, runs, own, ratio, loss, mean(paired) if paired else None))
    return sorted(rows, key=lambda row: row.loss.mean)


def _at_tuned_rate(method: str, config: Config, finished: Sequence[FinishedRun]) -> tuple[FinishedRun, ...]:
    own = [
        run
        for run in finished
        if run.method == method and run.config_hash == make_run(method, config, run.learning_rate, run.seed).config_hash
    ]
    if not own:
        return ()
    seeds = [run.seed for run in own]
    tuning = max(dict.fromkeys(sorted(seeds)), key=seeds.count)
    best = min((run for run in own if run.seed == tuning), key=lambda run: run.validation_loss).learning_rate
    return tuple(sorted((run for run in own if run.learning_rate == best), key=lambda run: run.seed))


_COLUMNS = (
    "method", "parameters", "mixer_parameters", "flops_per_token", "temporary_bytes", "step_over_baseline",
    "learning_rate", "seeds", "validation_loss", "validation_loss_half_width", "difference", "difference_half_width",
)  # fmt: skip


def write_csv(rows: Sequence[Result], file: Path) -> None:
    """Every figure of every method; half widths are those of 95 % Student intervals over seeds."""
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
        writer.writerow([row.method, *sizes, row.step_over_baseline or "", row.learning_rate, seeds, *figures])
    write_atomically(file, text.getvalue())


def markdown(rows: Sequence[Result], baseline: str = BASELINE) -> str:
    """The table for people."""
    lines = [
        f"| method | parameters (mixer) | kflop a token | memory, MiB | step / {baseline} | rate | seeds | "
        f"validation loss | less {baseline}, same seeds |",
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
Loss: final, on held-out text, nats a token; mean over seeds and 95 % Student interval. The rate was chosen on the first
seed, whose loss is therefore the least of several. Flops and memory: of loss and gradient, without the optimiser;
memory beside parameters and gradients; mHC's rounds of Sinkhorn count as one. Step: of a whole training step, the
methods taking turns on this machine.
"""


def _with_interval(value: Mean, sign: str = "") -> str:
    if not math.isfinite(value.mean):
        return "diverged"
    interval = f" ± {value.half_width:.4f}" if value.seeds > 1 else ""
    return f"{value.mean:{sign}.4f}{interval}"


def report(folder: Path, methods: Mapping[str, Config], baseline: str = BASELINE) -> None:
    """Writes `results.csv`, `results.md` and the pictures into the folder, and prints the table.

    Raises:
        UserError: a file cannot be written; there is no such baseline, or no finished run.
    """
    from ldm_jax.compare.plots import plot_comparison  # needs matplotlib

    check_baseline(baseline, methods)
    finished = read_finished(folder / "runs.csv")
    if not any(_at_tuned_rate(method, config, finished) for method, config in methods.items()):
        raise UserError(f"{folder} has no finished run of these methods as they are now: start compare.py on it again.")
    rows = results(folder, methods, method_costs(folder, methods), baseline)
    try:
        write_csv(rows, folder / "results.csv")
        write_atomically(folder / "results.md", markdown(rows, baseline))
    except OSError as error:
        raise UserError(f"the results cannot be written to {folder}: {error.strerror}.") from error
    print(markdown(rows, baseline))
    for file in [folder / "results.csv", folder / "results.md", *plot_comparison(rows, folder)]:
        print(file)
