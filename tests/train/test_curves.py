"""Pictures of the metrics of runs."""

from pathlib import Path

import pytest

from ldm_jax.errors import UserError
from ldm_jax.train.curves import distinct_names, plot_memory, plot_runs
from ldm_jax.train.metrics import MetricsFile


def test_pictures_of_a_run(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    for step in range(1, 9):
        loss = {"loss": 3 / step, "grad_norm": 1 / step, "learning_rate": 0.1, "tokens_per_second": 100.0}
        file.write({"step": step, "tokens": 10 * step, **loss})
        if step % 4 == 0:
            file.write(
                {"step": step, "tokens": 10 * step, "validation_loss": 2 / step, "validation_bits_per_byte": 1.0}
            )
            names = ("forgetting", "gain", "gate", "importance", "log10_condition")
            file.write({"step": step, **{name: [[step / 9, 0.5]] * 3 for name in names}})
    file.close()
    plot_runs([tmp_path], ["a run"], tmp_path / "curves.png")
    assert plot_memory(tmp_path, "a run", tmp_path / "memory.png")
    assert min((tmp_path / name).stat().st_size for name in ("curves.png", "memory.png")) > 10_000
    (tmp_path / "diverged").mkdir()
    (tmp_path / "diverged" / "metrics.jsonl").write_text(
        '{"step": 1, "tokens": 10, "loss": 3.0, "grad_norm": NaN, "learning_rate": 0.1}\n'
        '{"step": 2, "tokens": 20, "loss": NaN, "grad_norm": NaN, "learning_rate": 0.1}\n'
    )
    plot_runs([tmp_path / "diverged"], ["diverged"], tmp_path / "pictures" / "diverged.png")
    assert (tmp_path / "pictures" / "diverged.png").exists()
    (tmp_path / "empty").mkdir()
    assert not plot_memory(tmp_path / "empty", "empty", tmp_path / "none.png")
    with pytest.raises(UserError, match="empty"):
        plot_runs([tmp_path / "empty"], ["empty"], tmp_path / "none.png")


def test_distinct_names():
    assert distinct_names([Path("a/x"), Path("b/x"), Path("b/y")]) == ["a/x", "b/x", "b/y"]
    assert distinct_names([Path("a/x"), Path("b/y")]) == ["x", "y"]
    assert distinct_names([Path("a/x"), Path("a/x")]) == ["x", "x"]  # the same run twice
