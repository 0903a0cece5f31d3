"""Metrics beside metrics.jsonl: TensorBoard, Weights & Biases, profiles, pictures, utilisation."""

import dataclasses
import errno
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from ldm_jax.config import Config, LogConfig, ModelConfig
from ldm_jax.data import Batch
from ldm_jax.errors import UserError
from ldm_jax.infer import make_memory_figures
from ldm_jax.interpret.figures import inspect
from ldm_jax.mixers import LDMConfig, MixerConfig
from ldm_jax.nn import init_params
from ldm_jax.plots import distinct_names, plot_memory, plot_runs
from ldm_jax.train.metrics import MetricsFile
from ldm_jax.train.sinks import make_sinks
from ldm_jax.train.utilisation import model_flops_per_token, peak_flops
from runs import make_corpus, quietly, tiny, without_memory

ROW = {"step": 3, "loss": 1.5, "gate": [[0.25, 0.5], [0.75, 1.0]]}
SCALARS = {
    "loss": 1.5, "gate/sublayer_0/group_0": 0.25, "gate/sublayer_0/group_1": 0.5, "gate/sublayer_1/group_0": 0.75,
    "gate/sublayer_1/group_1": 1.0,
}  # fmt: skip


def with_log(**options):
    return Config(log=LogConfig(**options))


def test_tensorboard_gets_every_number(tmp_path):
    for step in (0, 2):
        (sink,) = make_sinks(with_log(tensorboard=True), tmp_path, step)
        assert sink.write(ROW) is None
        sink.close()
    files = sorted((tmp_path / "tensorboard").iterdir())
    assert len(files) == 2
    for file in files:
        assert all(name.encode() in file.read_bytes() for name in SCALARS)


def test_tensorboard_survives_a_full_disk(tmp_path, monkeypatch):
    from tensorboardX.record_writer import RecordWriter

    (sink,) = make_sinks(with_log(tensorboard=True), tmp_path, 0)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(RecordWriter, "flush", lambda self: (_ for _ in ()).throw(full))
        for _ in range(30):  # more than any queue holds
            assert "No space left on device" in sink.write(ROW)
    assert list((tmp_path / "tensorboard").iterdir()) == []
    assert sink.write(ROW) is None
    sink.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_wandb_gets_every_number(tmp_path, monkeypatch):
    logged, init_options = [], {}

    class Run:
        def log(self, row, step):
            logged.append((step, row))

        def finish(self):
            logged.append("finished")

    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")
    module.init = lambda **options: init_options.update(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", module)
    (sink,) = make_sinks(with_log(wandb_project="depth"), tmp_path / "a run", 0)
    sink.write(ROW)
    sink.close()
    assert logged == [(3, SCALARS), "finished"]
    assert (init_options["project"], init_options["name"], init_options["resume"]) == ("depth", "a run", "allow")
    run_id = init_options["id"]
    make_sinks(with_log(wandb_project="depth"), tmp_path / "a run", 2)
    assert init_options["id"] == run_id
    make_sinks(with_log(wandb_project="depth"), tmp_path / "another", 0)
    assert init_options["id"] != run_id


@pytest.mark.parametrize(
    ("options", "package"), [({"tensorboard": True}, "tensorboardX"), ({"wandb_project": "depth"}, "wandb")]
)
def test_a_missing_package_is_named(options, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=f"{package} is not installed"):
        make_sinks(with_log(**options), tmp_path, 0)


def test_a_profile_is_written(tmp_path):
    config = without_memory(tiny(make_corpus(tmp_path / "corpus"), steps=3))
    config = dataclasses.replace(config, log=LogConfig(every=1, profile_from=2, profile_steps=1))
    quietly(config, tmp_path / "run")
    assert any(file.is_file() for file in (tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_memory_figures_are_those_of_the_inspection():
    model = ModelConfig(depth=2, width=16, heads=2, mlp_width=16)
    config = Config(model=model, mixer=MixerConfig(ldm=LDMConfig(groups=2, key_dim=3, latent_dim=5)))
    params = init_params(model, config.mixer, 0)
    windows = np.random.default_rng(0).integers(256, size=(2, 9)).astype(np.int32)
    segments = np.array([[1] * 9, [1] * 4 + [2] * 5], np.int32)  # one window of two documents
    expected = inspect(config, params, Batch(windows, segments), 2)
    together = inspect(config, params, Batch(windows, None), 2)
    assert np.abs(together["log10_condition"] - expected["log10_condition"]).max() > 1e-4
    figures = make_memory_figures(config)(params, Batch(windows[:, :-1], segments[:, :-1]))
    for name, of_ends in (("gain", slice(-1)), ("gate", slice(-1)), ("log10_condition", slice(-1))):
        np.testing.assert_allclose(getattr(figures, name), expected[name][of_ends], rtol=1e-3, atol=1e-4)
    for name in ("forgetting", "importance"):
        np.testing.assert_allclose(getattr(figures, name), expected[name][1:], rtol=1e-3)
    ruined = jax.tree.map(lambda leaf: leaf * np.nan, params)
    assert np.isnan(make_memory_figures(config)(ruined, Batch(windows, None)).log10_condition).all()


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
    (tmp_path / "empty").mkdir()
    assert not plot_memory(tmp_path / "empty", "empty", tmp_path / "none.png")
    with pytest.raises(UserError, match="holds no metrics"):
        plot_runs([tmp_path / "empty"], ["empty"], tmp_path / "none.png")


def test_model_flops():
    # Six flops for each parameter of a PreLN model's matmuls; 12 for each position and channel of attention's scores.
    model = ModelConfig(depth=2, width=16, heads=2, mlp_width=24, qk_norm=False)
    config = without_memory(Config(model=model))
    norms = (2 * 2 + 1) * 16
    matrices = 2 * (4 * 16 * 16 + 3 * 16 * 24) + 256 * 16
    expected = 6 * (matrices + norms) + 12 * 2 * 16 * config.data.context
    assert model_flops_per_token(config) == expected
    assert peak_flops(1) is None  # a CPU is not in the table


def test_runs_of_one_name_have_distinct_ones():
    assert distinct_names([Path("a/x"), Path("b/x"), Path("b/y")]) == ["a/x", "b/x", "b/y"]
    assert distinct_names([Path("a/x"), Path("b/y")]) == ["x", "y"]
    assert distinct_names([Path("a/x"), Path("a/x")]) == ["x", "x"]  # the same run twice
