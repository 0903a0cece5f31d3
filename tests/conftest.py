"""Settings of all tests: annotations are checked at run time, and the random seed is printed."""

import os
import runpy
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The tests spend much more time on compilation than on computation.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
# The older fusion emitter of jaxlib 0.10 compiles in less than half the time. Later versions do not have the option.
os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""

import jax
import jaxtyping
import numpy as np
import pytest

jaxtyping.install_import_hook("ldm_jax", "beartype.beartype")
# A compilation cache for the tests of this process, and for the processes that they start.
_compiled = tempfile.TemporaryDirectory(prefix="ldm_jax_tests_")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
jax.config.update("jax_compilation_cache_dir", _compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def pytest_unconfigure() -> None:
    _compiled.cleanup()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of the tests' random inputs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files with the longest tests first, so that the workers finish at about the same time."""
    first = {"parallel", "train", "test_scripts.py"}
    items.sort(key=lambda item: first.isdisjoint(item.path.parts))


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed of random inputs: {config.getoption('--seed')} (--seed N); jax {jax.__version__}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.config.getoption("--seed"))


@pytest.fixture
def x64():
    """Enables JAX's 64-bit mode."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked_annotations():
    """Disables the annotation checks, so that the library's own errors are raised."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def script_here(capsys, monkeypatch, unchecked_annotations):
    """Runs a script in this process, where it starts faster; returns status and output."""

    def run(name, *arguments):
        file = Path(__file__).parents[1] / "scripts" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(file), *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as exit:
            code = exit.code
        said = capsys.readouterr()
        if isinstance(code, str):  # the interpreter would print it
            return subprocess.CompletedProcess([], 1, said.out, f"{said.err}{code}\n")
        return subprocess.CompletedProcess([], code, said.out, said.err)

    return run
