"""The layout of the package: imports in one direction, a pure memory, annotated and documented public functions."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ldm_jax

ROOT = Path(__file__).parents[1]
LAYERS = [
    {"memory"},
    {"mixers"},
    {"nn"},
    {"data", "parallel"},
    {"runs"},
    {"convert"},
    {"infer"},
    {"train"},
    {"compare", "interpret", "roofline", "bench"},
]
SHARED = {"typing", "sharding", "parameters", "errors", "files", "config", "options", "progress", "plots"}
"""Modules and packages that all layers may import."""
MODULES = sorted(ROOT.glob("ldm_jax/**/*.py"))


def package_of(module):
    return module.split(".")[1] if module.startswith("ldm_jax.") else None


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "ldm_jax")
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_in_one_direction(file):
    parts = file.relative_to(ROOT / "ldm_jax").parts
    if len(parts) == 1 or parts[0] in SHARED:
        return
    rank = next(rank for rank, names in enumerate(LAYERS) if parts[0] in names)
    allowed = set().union(*LAYERS[: rank + 1])
    for module in imports(file):
        package = package_of(module)
        assert package is None or package in allowed | SHARED, f"{file} imports {module}"
        assert not module.startswith("scripts")


@pytest.mark.parametrize("file", sorted((ROOT / "ldm_jax" / "memory").glob("*.py")), ids=lambda file: file.name)
def test_the_memory_imports_only_jax_numpy_and_the_standard_library(file):
    allowed = {"jax", "numpy", "jaxtyping", "typing", "collections", "dataclasses", "enum", "functools"}
    for module in imports(file):
        assert module.split(".")[0] in allowed or package_of(module) in {"memory", "typing"}, module


def test_the_memory_does_not_load_flax():
    code = "import ldm_jax.memory, sys; assert 'flax' not in sys.modules and 'orbax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names():
    names = (
        "Observation init_state rls_write rls_read rls_correction rls_apply rls_undo depth_memory_loop "
        "solve_depth_regression regression_objective"
    )
    for name in names.split():
        assert name in ldm_jax.__all__
        assert getattr(ldm_jax, name).__doc__
    assert ldm_jax.__version__


def public_functions():
    for file in MODULES:
        module = importlib.import_module(
            ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        )
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                yield pytest.param(value, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("function", list(public_functions()))
def test_public_functions_are_annotated_and_documented(function):
    signature = inspect.signature(function)
    assert function.__doc__
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in signature.parameters.values())
    assert signature.return_annotation is not inspect.Signature.empty
