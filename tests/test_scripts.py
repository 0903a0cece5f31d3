"""The scripts as a user starts them."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = """
[model]
depth = 1
width = 16
heads = 2
mlp_width = 16
[mixer.ldm]
groups = 2
latent_dim = 4
[data]
path = "{corpus}"
context = 16
validation_fraction = 0.2
[train]
steps = 4
batch_size = 4
checkpoint_every = 2
sample_tokens = 5
"""


def script(name, *arguments, **environment):
    """Runs a script; a variable of the environment that is None is removed."""
    environment = os.environ | {"COLUMNS": "200"} | environment
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{name}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={name: value for name, value in environment.items() if value is not None},
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a corpus, a config and a run."""
    home = tmp_path_factory.mktemp("home")
    for index in range(20):
        lines = "".join(f"{n} times {index} is {n * index}\n" for n in range(30))
        (home / f"{index}.txt").write_text(lines)
    (home / "tiny.toml").write_text(TINY.format(corpus=home / "*.txt"))
    environment = {"XDG_CACHE_HOME": str(home / "cache"), "JAX_COMPILATION_CACHE_DIR": None}
    result = script("train", home / "tiny.toml", "--run", home / "run", **environment)
    assert result.returncode == 0, result.stderr
    assert "def " in result.stdout
    assert result.stderr == ""
    return home


def test_compiled_programs_are_kept(home):
    assert any((home / "cache" / "ldm_jax" / "xla").iterdir())


def test_evaluate_tells_what_the_memory_is_worth(home, script_here):
    result = script_here("evaluate", f"{home / 'run'}@2")
    assert result.returncode == 0, result.stderr
    assert "step 2: " in result.stdout
    assert "validation loss: " in result.stdout
    assert "with all read gains at zero: " in result.stdout
    assert re.search(r"the memory's reads are worth -?\d\.\d{4} \+- \d\.\d{4} nats per token", result.stdout)


def test_evaluate_takes_a_text_shorter_than_a_window(home, script_here, tmp_path):
    text, file = tmp_path / "short.txt", tmp_path / "losses.json"
    text.write_text("short")
    result = script_here("evaluate", home / "run", "--text", text, "--json", file)
    figures = json.loads(file.read_text())["losses"][str(text)]
    assert f"loss: {figures['loss']:.4f} +- " in result.stdout
    assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / math.log(2))


def test_text_is_prepared_and_trained_on(home, script_here):
    flags = ["--files", home / "*.txt", "--tokenizer", "bpe", "--vocabulary", 300, "--validation-fraction", 0.2]
    result = script_here("prepare_data", *flags, "--out", home / "corpus")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "documents to train on" in result.stdout
    options = ["--data.path", "None", "--data.corpora", home / "corpus", "--data.weights", 2]
    result = script("train", home / "tiny.toml", "--run", home / "prepared", "--model.vocabulary", 300, *options)
    assert result.returncode == 0, result.stderr
    assert "bytes a token" in result.stdout


def test_preparing_nothing_is_one_sentence(script_here, tmp_path):
    result = script_here("prepare_data", "--out", tmp_path / "other")
    assert result.returncode == 1
    assert result.stderr == "error: give either files or a dataset.\n"


def test_sample_goes_on_from_the_prompt(home, script_here):
    result = script_here("sample", home / "run", "--prompt", "3 times ", "--tokens", 20)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 times ")
    assert len(result.stdout.encode(errors="replace")) >= 20


def test_help_shows_every_field(script_here):
    result = script_here("train", "--help")
    assert result.returncode == 0
    for words in (
        "--model.depth INT", "--mixer.kind {preln,ldm,attnres", "--mixer.ldm.forgetting-floor", "--log.every",
        "--optimizer.weight-decay", "{block,dots}", "(default: 6)",
    ):  # fmt: skip
        assert words in result.stdout, words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.toml"], "there is no config file missing.toml"),
        (["{home}/tiny.toml", "--model.deph", "3"], "Unrecognized options: --model.deph"),
        (["{home}/tiny.toml", "--mixer.kind", "ldn"], "invalid choice 'ldn'"),
        (["{home}/tiny.toml", "--model.heads", "3"], "heads is 3, which does not divide the width 16"),
        (["{home}/tiny.toml", "--mixer.ldm.groups", "5"], "groups is 5, which does not divide the width 16"),
        (["{home}/tiny.toml", "--data.path", "{home}/nothing/*"], "no file matches"),
        (["{home}/tiny.toml", "--data.context", "100000", "--run", "{home}/new"], "one window needs 100,001"),
        (["{home}/tiny.toml", "--run", "{home}"], "holds other files"),
        (["{home}/tiny.toml", "--run", "{home}/run", "--mixer.kind", "preln"], "checkpoints of another model"),
        ([], "required"),
        (["--model.depth", "1", "{home}/tiny.toml"], "the config file comes first"),
        (["{home}/tiny.toml", "--model.scan", "no"], "invalid choice 'no'"),
    ],
)
def test_wrong_input_is_one_sentence(home, script_here, arguments, words):
    result = script_here("train", *(argument.format(home=home) for argument in arguments))
    assert result.returncode != 0
    assert words in " ".join((result.stdout + result.stderr).split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("name", "flags"), [("sample", ()), ("evaluate", ()), ("export_hf", ("--out", "new"))])
def test_no_run_is_one_sentence(script_here, tmp_path, name, flags):
    result = script_here(name, tmp_path / "nothing", *flags)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "holds no run" in result.stderr


def test_sample_of_bytes_that_are_no_text_in_a_terminal_that_knows_ascii(home):
    result = script("sample", home / "run", "--prompt", "\udcff", "--tokens", 9, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "flag", "words"),
    [
        ("sample", "--temperature=nan", "temperature is nan"),
        ("sample", "--top-p=0", "top_p is 0.0"),
        ("sample", "--seed=99999999999999999999", "seed is 99999999999999999999"),
        ("sample", "--tokens=0", "number of tokens is 0"),
        ("evaluate", "--windows=-3", "windows is -3"),
        ("evaluate", "--limit=3", "without --tasks"),
    ],
)
def test_inadmissible_numbers_are_one_sentence(home, script_here, name, flag, words):
    result = script_here(name, home / "run", flag)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert words in result.stderr


def test_underscores_and_lower_case_booleans_in_flags(home, script_here):
    flags = ["--log.every", "2", "--model.scan", "true"]
    result = script_here("train", home / "tiny.toml", *flags, "--run", home / "run")
    assert result.returncode == 0, result.stderr
    assert "log.every was 10 and is now 2" in result.stdout


@pytest.mark.slow
def test_a_disk_that_fills_up_keeps_what_there_was(home):
    # A limit on the size of files stands for a disk that fills up during the save. (The storage layer's own
    # threads complain at length.)
    code = (
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        f"sys.argv = ['train.py', {str(home / 'tiny.toml')!r}, '--run', {str(home / 'run')!r}, '--train.steps', '6']\n"
        f"runpy.run_path({str(ROOT / 'scripts' / 'train.py')!r}, run_name='__main__')\n"
    )
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240, env=environment
    )
    assert result.returncode == 1
    (sentence,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert sentence.startswith("error: the checkpoint of step 6 could not be written")
    assert "File too large. The checkpoint of step 4 is kept." in sentence
    again = script("train", home / "tiny.toml", "--run", home / "run", "--train.steps", 6)
    assert again.returncode == 0, again.stderr
    assert "resuming from step 4" in again.stdout
