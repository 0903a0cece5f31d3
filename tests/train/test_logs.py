"""Metrics beside metrics.jsonl: TensorBoard, Weights & Biases, profiles, utilisation."""

import dataclasses
import errno
import sys
import types

import pytest

from ldm_jax.config import Config, LogConfig, ModelConfig
from ldm_jax.errors import UserError
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


class WandbRun:
    """A stand-in for a run of Weights & Biases, which drops rows whose number does not increase."""

    def __init__(self):
        self.rows, self.metrics, self.last = [], {}, -1

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def log(self, row, step=None):
        number = self.last + 1 if step is None else step
        if number > self.last:
            self.rows.append(row)
            self.last = number

    def finish(self):
        pass


def test_wandb_gets_every_number_and_every_row_of_a_resumed_run(tmp_path, monkeypatch):
    runs, init_options = {}, {}
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")
    module.init = lambda **options: init_options.update(options) or runs.setdefault(options["id"], WandbRun())
    monkeypatch.setitem(sys.modules, "wandb", module)
    for checkpoint, steps in ((0, range(1, 6)), (2, range(3, 9))):  # killed at step 5, resumed from 2
        (sink,) = make_sinks(with_log(wandb_project="depth"), tmp_path / "a run", checkpoint)
        for step in steps:
            assert sink.write({**ROW, "step": step}) is None
        sink.close()
    ((_, run),) = runs.items()
    assert run.rows == [{"step": step, **SCALARS} for step in (1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8)]
    assert run.metrics == {"step": None, "*": "step"}
    assert (init_options["project"], init_options["name"], init_options["resume"]) == ("depth", "a run", "allow")
    make_sinks(with_log(wandb_project="depth"), tmp_path / "another", 0)
    assert len(runs) == 2


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


def test_model_flops():
    # Six flops for each parameter of a PreLN model's matmuls; 12 for each position and channel of attention's scores.
    model = ModelConfig(depth=2, width=16, heads=2, mlp_width=24, qk_norm=False)
    config = without_memory(Config(model=model))
    norms = (2 * 2 + 1) * 16
    matrices = 2 * (4 * 16 * 16 + 3 * 16 * 24) + 256 * 16
    expected = 6 * (matrices + norms) + 12 * 2 * 16 * config.data.context
    assert model_flops_per_token(config) == expected
    assert peak_flops(1) is None  # a CPU is not in the table
