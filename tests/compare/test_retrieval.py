"""The synthetic recall task, where the answer is known."""

import numpy as np
import pytest

from ldm_jax.compare.plots import plot_retrieval
from ldm_jax.compare.retrieval import BATCH, Task, retrieval_errors

CORRELATIONS = (0.0, 0.9)


def test_recall_of_each_write(tmp_path):
    few = Task(layers=4, key_dim=8, value_dim=16, alpha=1e4, trials=32)
    errors = retrieval_errors(few, CORRELATIONS)
    # Fewer layers than key dimensions: the regression recalls all of them, whatever the correlation.
    assert max(errors["rls"] + errors[BATCH]) < 1e-3
    # The others do not, and get worse as the keys get more similar.
    for write in ("additive", "delta"):
        assert 0.05 < errors[write][0] < errors[write][1] <= 1
    many = few._replace(layers=32)
    assert retrieval_errors(many, CORRELATIONS)["rls"] == pytest.approx([1 - 8 / 32] * 2, abs=0.02)  # K of N directions
    plot = tmp_path / "retrieval.png"
    plot_retrieval(CORRELATIONS, {few: errors}, plot)
    assert plot.stat().st_size > 10_000


def test_rls_is_the_batch_solution_under_a_ridge():
    errors = retrieval_errors(Task(layers=6, key_dim=4, value_dim=8, trials=8), CORRELATIONS)
    np.testing.assert_allclose(errors["rls"], errors[BATCH], rtol=1e-5)


def test_inadmissible_tasks():
    with pytest.raises(ValueError, match=r"correlations are \(1.5,\)"):
        retrieval_errors(Task(4), [1.5])
    with pytest.raises(ValueError, match="layers are 0"):
        retrieval_errors(Task(0), [0.5])
