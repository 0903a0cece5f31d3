"""Exit statuses and messages of the scripts."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from ldm_jax.config import Config, TrainConfig
from ldm_jax.config.command_line import (
    TrainArguments,
    override,
    parse,
    parse_over_config,
    run_script,
    split_overrides,
)
from ldm_jax.errors import DivergedError, UserError

ROOT = Path(__file__).parents[1]


def fail_with(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(("error", "status"), [(UserError("no such file."), 1), (DivergedError("the loss is nan."), 3)])
def test_an_error_is_a_sentence_and_a_status(monkeypatch, error, status):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    code = (
        "from ldm_jax.config.command_line import run_script\n"
        "from ldm_jax.errors import DivergedError, UserError\n"
        f"def main(): raise {error!r}\n"
        "run_script(main)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (result.returncode, result.stderr) == (status, f"error: {error}\n")


@pytest.fixture
def interruptible():
    """Handles SIGINT, also in processes that are started here, where this one was started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("file", sorted((ROOT / "scripts").glob("*.py")), ids=lambda file: file.stem)
def test_an_interruption_of_the_imports_is_a_line(file, tmp_path, interruptible):
    for package in ("jax", "tyro", "pdoc"):  # stand-ins that take forever
        (tmp_path / f"{package}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, file]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    expected = (0, "") if file.stem == "interruptible" else (130, "\ninterrupted.\n")
    assert (result.returncode, result.stderr) == expected


def test_an_interruption_is_a_line_and_a_status(monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    with pytest.raises(SystemExit, match="130"):
        run_script(fail_with(KeyboardInterrupt()), "interrupted: run it again.")
    assert capsys.readouterr().err == "\ninterrupted: run it again.\n"


def test_other_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    with pytest.raises(RuntimeError, match="a bug"):
        run_script(fail_with(RuntimeError("a bug")))


def test_compare_and_retrieval(tmp_path, script_here):
    kept = ROOT / "configs" / "compare" / "results" / "methods"
    for name in ("runs.csv", "costs.json"):
        (tmp_path / name).write_bytes((kept / name).read_bytes())

    result = script_here("compare", "report", tmp_path, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert (kept / "results.md").read_text() in result.stdout
    assert (tmp_path / "results.csv").read_text() == (kept / "results.csv").read_text()
    # The kept rows are all that the configs need, so nothing is trained.
    configs = sorted(ROOT.glob("configs/compare/*.toml"))
    result = script_here("compare", *configs, "--out", tmp_path, "--learning-rates", 1e-3, 2e-3, 4e-3)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "runs").exists()
    out = tmp_path / "retrieval.png"
    result = script_here("retrieval", "--layers", 4, "--trials", 2, "--correlations", 0, "--out", out)
    assert result.returncode == 0, result.stderr
    assert out.exists()


@dataclasses.dataclass(frozen=True)
class PathArguments:
    """Arguments."""

    run: tyro.conf.Positional[Path]
    files: tuple[Path, ...] = ()
    out: Path | None = None


def test_the_home_directory_in_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = parse(PathArguments, ["~/run", "--files", "a", "~/b", "--out", "~"])
    assert arguments == PathArguments(tmp_path / "run", (Path("a"), tmp_path / "b"), tmp_path)
    with pytest.raises(UserError, match=str(tmp_path / "c.toml")):
        parse_over_config(TrainArguments, ["~/c.toml"])


def test_flags_override_any_config():
    others, overrides = split_overrides(["a.toml", "--train.steps", "30", "--jobs", "2", "--model.scan=false"])
    assert others == ["a.toml", "--jobs", "2"]
    config = override(Config(train=TrainConfig(batch_size=2)), overrides)
    assert (config.train.steps, config.train.batch_size, config.model.scan) == (30, 2, False)
    with pytest.raises(SystemExit):
        override(Config(), ["--train.stpes", "30"])


def test_help_keeps_no_line_breaks_of_docstrings(capsys):
    with pytest.raises(SystemExit):
        parse_over_config(TrainArguments, [str(ROOT / "configs" / "tiny.toml"), "--help"])
    text = capsys.readouterr().out
    assert "on a cluster that JAX" + 9 * " " not in text  # where the docstring breaks the line
    assert "(config: 32, default: 128)" in text
