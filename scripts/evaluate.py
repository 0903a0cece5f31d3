"""Prints the loss of a trained model on text, or its scores in benchmarks.

`python scripts/evaluate.py RUN [--text FILE ...] [--data CORPUS ...] [--tasks TASK ...]`
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interruptible  # noqa: F401 (first)
import tyro

from ldm_jax.config.command_line import parse, run_script
from ldm_jax.data import ValidationText, load_data, load_validation_text
from ldm_jax.data.documents import FileSource
from ldm_jax.errors import UserError
from ldm_jax.files import save_text
from ldm_jax.infer import Evaluation, Model, evaluate_text, load_model, make_evaluate
from ldm_jax.infer.benchmarks import benchmark_json, benchmark_table, require_lm_eval, run_benchmarks
from ldm_jax.mixers import DepthMemoryConfig, without_reads
from ldm_jax.nn import Params

Figures = dict[str, float | None]


@dataclass(frozen=True)
class Arguments:
    """Prints loss, perplexity and bits per byte with standard errors; of a depth memory also without its reads. Prints
    the scores in benchmarks."""

    run: tyro.conf.Positional[Path]
    """Directory of the run, for its last checkpoint; RUN@STEP for that of a step. Or that of an exported model or a
    Hugging Face checkpoint."""
    text: tuple[str, ...] = ()
    """Files, or patterns of files, of any length, evaluated one by one. All of their text counts."""
    data: tuple[str, ...] = ()
    """Prepared corpora, files or patterns of files, evaluated one by one as the held-out text is in training. If there
    is neither --text, --data nor --tasks: the held-out text of the run's own data."""
    windows: int = 256
    """Number of windows, each of one context, spread evenly over the held-out text; at most as many as it has."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval: names, groups, patterns such as "mmlu_*", or YAML files. Needs pip install 'ldm_jax[eval]'."""
    task_path: Path | None = None
    """Directory of YAML files of your own tasks."""
    limit: int | None = None
    """Evaluate this many examples of every task. None: all."""
    fewshot: int | None = None
    """Number of solved examples before every question. None: as the task says."""
    batch_size: int = 8
    """Windows, or sequences of a task, per batch."""
    json: Path | None = None
    """File for all results as JSON."""


def _check(arguments: Arguments) -> None:
    for name, least in (("windows", 1), ("batch_size", 1), ("limit", 1), ("fewshot", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"{name} is {value}, but it must be at least {least}.")
    for name in ("task_path", "limit", "fewshot"):
        if getattr(arguments, name) is not None and not arguments.tasks:
            raise UserError(f"{name} is {getattr(arguments, name)}, but it has no effect without --tasks.")
    file = arguments.json
    if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
        raise UserError(f"json is {file}, which cannot be written: give a file in a directory that can be.")
    if arguments.tasks:
        require_lm_eval()


def main() -> None:
    """Parses the arguments, evaluates and prints."""
    arguments = parse(Arguments)
    _check(arguments)
    run, results = load_model(arguments.run), {}
    for path in arguments.text:
        results[path] = _evaluate_text(run, path, arguments)
    for path in arguments.data:
        text = load_validation_text(path, run.config.data, run.tokenizer)
        results[path] = _evaluate_windows(run, text, f"tokens of {path}", arguments)
    if not (arguments.text or arguments.data or arguments.tasks):
        try:
            data = load_data(run.config.data, run.config.model.vocabulary)
        except UserError as error:
            raise UserError(f"{error} Or give other text: --text, --data or --tasks.") from error
        if data.tokenizer.fingerprint != run.tokenizer.fingerprint:
            raise UserError("the run was trained with another tokenizer than that of its data now: restore the corpus.")
        if data.fingerprint != run.corpus:
            print("note: the corpus has changed since the run, so the held-out text may include training text")
        results["held-out text"] = _evaluate_windows(run, data, "held-out tokens", arguments)
    report: dict[str, Any] = {"run": str(run.path), "step": run.step, "losses": results}
    if arguments.tasks:
        print(f"{arguments.run}, step {run.step}: {', '.join(arguments.tasks)}", flush=True)
        benchmarks = run_benchmarks(
            run,
            arguments.tasks,
            batch_size=arguments.batch_size,
            limit=arguments.limit,
            fewshot=arguments.fewshot,
            task_path=arguments.task_path,
        )
        print(benchmark_table(benchmarks))
        report["benchmarks"] = benchmark_json(benchmarks)
    if arguments.json is not None:
        save_text(arguments.json, json.dumps(report, indent=1) + "\n")


def _evaluate_text(run: Model, path: str, arguments: Arguments) -> Figures:
    texts = [text for text, _ in FileSource([path], "text").documents(None)]
    print(f"{arguments.run}, step {run.step}: all of {path}; +- standard error")
    evaluate = lambda params: evaluate_text(dataclasses.replace(run, params=params), texts, arguments.batch_size)  # noqa: E731
    return _report(run, "loss", evaluate)


def _evaluate_windows(run: Model, text: ValidationText, tokens: str, arguments: Arguments) -> Figures:
    windows = text.validation_windows(arguments.windows)
    evaluate = make_evaluate(
        run.graph, arguments.batch_size, text.bytes_per_token, end_of_document=text.tokenizer.end_of_document
    )
    count = len(windows.weights)
    size = f"{count} window{'s' * (count != 1)} of {text.context} {tokens}"
    print(f"{arguments.run}, step {run.step}: {size}; +- standard error")
    return _report(run, "validation loss", lambda params: evaluate(params, windows))


def _report(run: Model, loss: str, evaluate: Callable[[Params], Evaluation]) -> Figures:
    """Prints the result of an evaluation; returns its figures."""
    result = evaluate(run.params)
    print(f"{loss}: {result}")
    figures: Figures = {name: getattr(result, name) for name in ("loss", "standard_error", "bits_per_byte")}
    if isinstance(run.config.mixer.options, DepthMemoryConfig):
        silent = evaluate(without_reads(run.params))
        print(f"with all read gains at zero: {silent}")
        worth, error = silent.difference(result)
        print(f"the memory's reads are worth {worth:.4f} +- {error:.4f} nats per token to this model")
        figures["loss_without_reads"] = silent.loss
    return {name: value if value is not None and math.isfinite(value) else None for name, value in figures.items()}


if __name__ == "__main__":
    run_script(main)
