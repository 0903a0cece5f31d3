"""Benchmarks by lm-eval, on tasks in local files. They need `pip install -e '.[eval]'`."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.errors import UserError

pytest.importorskip("lm_eval")

import datasets
from lm_eval.api.instance import Instance
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ldm_jax.infer.benchmarks import benchmark_json, benchmark_table, language_model, run_benchmarks
from ldm_jax.infer.scoring import cut_windows
from scored_model import CONTEXT, by_hand, make_model

pytestmark = pytest.mark.filterwarnings("default")  # of lm-eval and its dependencies
TASKS = {
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
""",
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no"]
doc_to_target: 0
metric_list:
  - metric: acc
""",
    "generation": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "yes"
generation_kwargs:
  until: ["x"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A directory with tasks, whose data are a file of JSON lines."""
    home = tmp_path_factory.mktemp("tasks")
    patch = pytest.MonkeyPatch()
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "cache")
    rows = [{"text": "abc " * (20 * index + 1), "question": f"Is {index} even? "} for index in range(5)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs:\n  data_files: {home / 'rows.jsonl'}\ntest_split: train\n"
    for name, text in TASKS.items():
        (home / f"{name}.yaml").write_text(f"task: local_{name}\n{data}{text}")
    (home / "remote.yaml").write_text(
        f"task: remote\ndataset_path: nobody/nothing\ntest_split: test\n{TASKS['rolling']}"
    )
    yield home
    patch.undo()


@pytest.fixture(scope="module")
def model():
    return make_model()


def requests(kind, arguments):
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_rolling_windows_are_those_of_lm_eval():
    for count in (1, 47, 48, 49, 96, 100):
        tokens = list(range(1, count + 1))
        theirs = map(make_disjoint_window, get_rolling_token_windows(tokens, 0, CONTEXT, 1))
        expected = [([*before, *after], len(after)) for before, after in theirs]
        found = [(window.tokens.tolist(), window.scored) for window in cut_windows([0], tokens, CONTEXT)]
        assert found == expected


def test_tasks_of_a_directory(tasks, model):
    names = ["local_rolling", "local_choice", "local_generation"]
    uniform = dataclasses.replace(model, params=jax.tree.map(jnp.zeros_like, model.params))
    results = run_benchmarks(uniform, names, batch_size=4, task_path=tasks, limit=4)
    assert results["results"]["local_rolling"]["bits_per_byte,none"] == pytest.approx(8, rel=1e-6)
    assert "local_choice" in benchmark_table(results)
    assert json.dumps(benchmark_json(results), allow_nan=False)
    assert benchmark_json({"loss": math.inf, "error": math.nan}) == {"loss": None, "error": None}
    with pytest.raises(UserError, match="fewshot is 9"):
        run_benchmarks(uniform, ["local_choice"], task_path=tasks, fewshot=9)


def test_log_likelihoods_are_those_of_the_logits(model, rng):
    text = "".join(map(chr, rng.integers(97, 122, 200)))
    pairs = [
        (text[:10], text[10:13]), ("", text[:5]), (text[:3] + " ", "abc"), ("  ", "ab"),
        (text[:CONTEXT], "a"), (text[: CONTEXT + 1], "a"), (text[:5], text[5:120]),
    ]  # fmt: skip
    found = [language_model(model, size).loglikelihood(requests("loglikelihood", pairs)) for size in (1, 4)]
    for (before, after), *results in zip(pairs, *found, strict=True):
        expected, greedy = by_hand(model, before.encode() or [0], after.encode())
        if before.strip() == "" and before:  # moved to the continuation
            expected, greedy = by_hand(model, [0], (before + after).encode())
        elif before.endswith(" "):
            expected, greedy = by_hand(model, before.strip().encode(), f" {after}".encode())
        for log_likelihood, is_greedy in results:
            assert log_likelihood == pytest.approx(expected, rel=1e-5, abs=1e-5)
            assert is_greedy == greedy
    rolling = requests("loglikelihood_rolling", [(text,), ("",)])
    log_likelihood, empty = language_model(model).loglikelihood_rolling(rolling)
    assert log_likelihood == pytest.approx(by_hand(model, [0], text.encode())[0], rel=1e-5)
    assert empty == 0


def greedy_text(model, prompt, count):
    tokens = list(prompt.encode())[-(CONTEXT - count) :]
    start = len(tokens)
    for _ in range(count):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(model.logits(jnp.asarray(padded))[0, len(tokens) - 1])))
    return bytes(tokens[start:]).partition(b"\0")[0].decode(errors="replace")


def test_texts_are_greedy_until_a_stop_string(model):
    text = "the quick brown fox jumps over the lazy dog and then it does so again"
    prompts = [text[:5], text[:CONTEXT], text[: CONTEXT + 1], text[:30]]
    options = [{"max_gen_toks": count, "until": []} for count in (4, 4, 6, 3)]
    expected = [greedy_text(model, prompt, each["max_gen_toks"]) for prompt, each in zip(prompts, options, strict=True)]
    stop = next(letter for letter in "".join(expected)[1:] if letter.isascii())
    prompts, options = [*prompts, *prompts], [*options, *({**each, "until": stop} for each in options)]
    for size in (1, 4):
        found = language_model(model, size).generate_until(
            requests("generate_until", list(zip(prompts, options, strict=True)))
        )
        assert found[:4] == expected
        assert found[4:] == [word.partition(stop)[0] for word in expected]


def test_draws_do_not_depend_on_the_batch_size(model):
    asked = requests(
        "generate_until",
        [("abc", {"do_sample": True, "temperature": 9.0, "max_gen_toks": 9, "top_k": 0, "until": []})] * 3,
    )
    one, four = (language_model(model, size).generate_until(asked) for size in (1, 4))
    assert one == four
    assert len(set(one)) > 1
    with pytest.raises(UserError, match="num_beams"):
        language_model(model).generate_until(requests("generate_until", [("abc", {"num_beams": 10})]))


def test_tasks_that_cannot_be_loaded_are_named(tasks, model, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="task remote cannot be loaded"):
        run_benchmarks(model, ["remote"], task_path=tasks)


@pytest.mark.slow  # the index of lm-eval's own tasks takes 15 seconds
def test_unknown_tasks_are_named(tasks, model):
    with pytest.raises(UserError, match="there is no task local_choise: did you mean local_choice"):
        run_benchmarks(model, ["local_choise"], task_path=tasks)
