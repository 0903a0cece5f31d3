"""Benchmarks of a trained model by lm-eval, the Language Model Evaluation Harness of EleutherAI.

lm-eval is optional, so it is imported in functions only.
"""

import difflib
import importlib.util
import json
import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ldm_jax.errors import UserError
from ldm_jax.infer.completion import Completion
from ldm_jax.infer.generation import generate
from ldm_jax.infer.model import Model
from ldm_jax.infer.sampling import Sampling
from ldm_jax.infer.scoring import score_continuations

BOOTSTRAP_SAMPLES = 1000
"""For standard errors of metrics that are not means. lm-eval's 100,000 take hours on its larger data sets."""
SAMPLING_OPTIONS = ("top_k", "top_p", "min_p", "repetition_penalty")


def require_lm_eval() -> None:
    """Raises UserError unless lm-eval is installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("benchmarks need lm-eval: pip install 'ldm_jax[eval]', or -e '.[eval]' in a clone.")


def run_benchmarks(
    model: Model,
    tasks: Sequence[str],
    *,
    batch_size: int = 8,
    limit: int | None = None,
    fewshot: int | None = None,
    task_path: Path | None = None,
) -> dict[str, Any]:
    """The results of lm-eval's `simple_evaluate`, without the single answers.

    Args:
        model: a trained model.
        tasks: names of tasks, groups or tags, patterns of these such as `mmlu_*`, or YAML files of tasks.
        batch_size: sequences per batch.
        limit: evaluate the first examples of every task only. None: all.
        fewshot: number of solved examples in the prompt. None: as the task says.
        task_path: a directory of YAML files of tasks, besides those of lm-eval.

    Raises:
        UserError: lm-eval is missing, a task is unknown or cannot be loaded or has fewer examples than `fewshot`, or
            the model's logits are NaN.
    """
    require_lm_eval()
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval would fork, and JAX's threads do not survive that
    manager, loaded = _load_tasks(tasks, task_path)
    try:
        results = simple_evaluate(
            language_model(model, batch_size),
            tasks=loaded,
            task_manager=manager,
            num_fewshot=fewshot,
            batch_size=batch_size,
            limit=limit,
            bootstrap_iters=BOOTSTRAP_SAMPLES,
            log_samples=False,
        )
    except ValueError as error:
        if fewshot is None or "larger than population" not in str(error):
            raise
        raise UserError(f"fewshot is {fewshot}, but a task has fewer examples: give a smaller number.") from error
    return dict(results)


def benchmark_table(results: Mapping[str, Any]) -> str:
    """lm-eval's table of the results, in Markdown; of groups, if there are any, also."""
    from lm_eval.utils import make_table  # pyright: ignore[reportMissingImports]

    return "\n".join(make_table(results, part) for part in ("results", "groups") if results.get(part))


def benchmark_json(results: Mapping[str, Any]) -> Any:
    """The results as JSON values; numbers that are not finite, which JSON does not have, as None."""
    from lm_eval.utils import handle_non_serializable  # pyright: ignore[reportMissingImports]

    text = json.dumps(results, default=handle_non_serializable)
    return json.loads(text, parse_constant=lambda _: None)


def language_model(model: Model, batch_size: int = 8) -> Any:
    """A trained model as an `lm_eval.api.model.LM`, for use with lm-eval's Python interface.

    Requests are encoded and cut as by lm-eval's own class for transformers. The tokens `model.start` precede a context;
    the empty context is the last of them, or else the end-of-document token. Results do not depend on the batch size,
    except for rounding.

    Raises:
        UserError: lm-eval is missing.
    """
    require_lm_eval()
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]

    tokenizer, context = model.tokenizer, model.config.data.context

    class LanguageModel(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return tokenizer.end_of_document

        @property
        def prefix_token_id(self) -> int:
            return model.start[-1] if model.start else tokenizer.end_of_document

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            start = () if add_special_tokens is False else model.start
            return [*start, *tokenizer.encode(string).tolist()]

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            pairs = [(before or [self.prefix_token_id], tokens) for _, before, tokens in requests]
            return score_continuations(model, pairs, batch_size)

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            del disable_tqdm
            pairs = [
                ([self.prefix_token_id], self.tok_encode(request.args[0], add_special_tokens=False))
                for request in requests
            ]
            return [log_likelihood for log_likelihood, _ in score_continuations(model, pairs, batch_size)]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            del disable_tqdm
            options = [normalize_gen_kwargs(request.args[1]) for request in requests]
            prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
            groups: defaultdict[Sampling, list[int]] = defaultdict(list)
            for index in sorted(range(len(requests)), key=lambda index: -len(prompts[index])):
                groups[_sampling(options[index])].append(index)
            texts: dict[int, str] = {}
            for sampling, indices in groups.items():
                # A draw depends on its row in the batch.
                size = 1 if sampling.temperature else batch_size
                for start in range(0, len(indices), size):
                    batch = indices[start : start + size]
                    limits = [options[index]["max_gen_toks"] for index in batch]
                    words = [[word.encode() for word in options[index]["until"]] for index in batch]
                    # As in lm-eval, a prompt is cut at its start if prompt and text do not fit the context.
                    kept = [context - limit if limit < context else context for limit in limits]
                    cut = [prompts[index][-length:] for index, length in zip(batch, kept, strict=True)]
                    found = _complete(model, cut, limits, words, sampling, seed=batch[0], rows=size)
                    texts |= dict(zip(batch, found, strict=True))
            return [texts[index] for index in range(len(requests))]

    return LanguageModel()


def _complete(
    model: Model,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop: Sequence[Sequence[bytes]],
    sampling: Sampling,
    seed: int,
    rows: int,
) -> list[str]:
    """The texts after prompts, each with its own most tokens and stop strings, as a batch with so many rows."""
    texts = [Completion(model.tokenizer, *each) for each in zip(stop, prompts, strict=True)]
    padded = [*prompts, *[prompts[0]] * (rows - len(prompts))]
    tokens = generate(
        model.graph, model.params, padded, model.config.data.context,
        ids=model.tokenizer.ids, sampling=sampling, seed=seed,
    )  # fmt: skip
    for number in range(max(limits)):
        for text, token, limit in zip(texts, next(tokens), limits, strict=False):
            _ = text.add(int(token)) if number < limit else text.finish()
        if all(text.finished for text in texts):
            break
    for text in texts:
        text.finish()
    return [text.text.decode(errors="replace") for text in texts]


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """The sampling of normalised `generation_kwargs`; greedy without `do_sample`. Raises UserError."""
    known = {"until", "max_gen_toks", "do_sample", "temperature", *SAMPLING_OPTIONS}
    for name, value in options.items():
        if name not in known and (name, value) != ("num_beams", 1):
            raise UserError(
                f"a task has {name} = {value!r} in its generation_kwargs, but only these are supported: "
                f"{', '.join(sorted(known))}."
            )
    if not options["do_sample"]:
        return Sampling(temperature=0.0)
    filters = {name: options[name] for name in SAMPLING_OPTIONS if options.get(name) is not None}
    if filters.get("top_k") == 0:
        del filters["top_k"]
    try:
        return Sampling(temperature=float(options.get("temperature", 1.0)), **filters)
    except ValueError as error:
        raise UserError(f"the generation_kwargs of a task are wrong: {error}") from error


def _load_tasks(names: Sequence[str], directory: Path | None) -> tuple[Any, list[Any]]:
    """The task manager, and the tasks and groups. Raises UserError if one is unknown or cannot be loaded."""
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    if directory is not None and not directory.is_dir():
        raise UserError(f"--task-path is {directory}, but there is no such directory.")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry
    manager = None
    if directory is not None:
        manager = TaskManager(include_path=str(directory), include_defaults=False)
    if manager is None or not all(manager.match_tasks([name]) for name in names):
        # Its own tasks also, whose index takes 15 seconds.
        manager = TaskManager(include_path=None if directory is None else str(directory))
    loaded: dict[str, Any] = {}
    for name in names:
        matches = manager.match_tasks([name]) or ([name] if Path(name).is_file() else [])
        if not matches:
            close = difflib.get_close_matches(name, manager.all_tasks, 3)
            hint = f"did you mean {', '.join(close)}?" if close else "lm-eval ls tasks prints all."
            raise UserError(f"there is no task {name}: {hint}")
        for match in matches:
            try:
                found = manager.load([match])
            except Exception as error:  # the libraries raise a dozen types
                why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")
                hint = (
                    " Run it once with a network, which keeps its data, or give a task with local data in --task-path."
                    if isinstance(error, ConnectionError)
                    else ""
                )
                raise UserError(f"the task {match} cannot be loaded: {why}.{hint}") from error
            loaded |= {match: found["groups"][match]} if match in found["groups"] else found["tasks"]
    return manager, list(loaded.values())
