"""Implicit dtype promotion is an error in the tests of the memory."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
