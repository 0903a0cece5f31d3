"""What holds in every test: annotations are checked, the seed is printed."""

import os
import tempfile
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The tests compile far more than they compute.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
# jaxlib 0.10 has another way to emit fusions, which compiles in less than half the time; later ones have one way.
os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""

import jax
import jaxtyping
import numpy as np
import pytest

jaxtyping.install_import_hook("ldm_jax", "beartype.beartype")
_compiled = tempfile.TemporaryDirectory(prefix="ldm_jax_tests_")  # what one test compiles, the next one has
jax.config.update("jax_compilation_cache_dir", _compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def pytest_unconfigure() -> None:
    _compiled.cleanup()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of the tests' random inputs")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed of random inputs: {config.getoption('--seed')} (--seed N); jax {jax.__version__}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.config.getoption("--seed"))


@pytest.fixture
def x64():
    """The test runs in JAX's 64-bit mode."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked_annotations():
    """Off with the annotation checks, so that the sentences of our own errors are what is raised."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
