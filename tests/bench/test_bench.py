"""The benchmark: what a row holds, how its ratios come about, what it refuses."""

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from ldm_jax.bench import training as bench
from ldm_jax.bench.loader import loader_rows
from ldm_jax.bench.table import plot_memory, print_rows, write_rows
from ldm_jax.config import Config, DataConfig, ModelConfig
from ldm_jax.errors import UserError
from ldm_jax.memory import Backward
from ldm_jax.mixers import Form, MixerConfig, MixerKind
from ldm_jax.roofline import compile as compiled
from ldm_jax.roofline.compile import tpu_chip

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"
KEYS = ["what", "mixer", "backward", "form", "key_dim", "depth", "compute_dtype", "value", "unit", "ratio_to_preln"]
without_tpu_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="it is installed")
with_tpu_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")


@pytest.fixture
def small(monkeypatch):
    """Of the sizes that are measured only the depth stays."""
    monkeypatch.setattr(bench, "CPU_SIZE", bench.Size(width=64, tokens=32, batch=2))


def test_memory_rows(small, tmp_path, capsys):
    rows = list(bench.memory_rows(None, [Backward.REVERSIBLE], [Form.RECURRENT], [4], (2, 4)))
    print_rows(rows, "a title")
    assert "slope_per_block  ldm    reversible recurrent   4     4" in capsys.readouterr().out
    assert {row.what for row in rows} == {"temporary_bytes", "slope_per_block"}
    preln = {row.what: row for row in rows if (row.mixer, row.backward, row.depth) == ("preln", "remat", 4)}
    ldm = {row.what: row for row in rows if (row.mixer, row.depth) == ("ldm", 4)}
    for what, row in ldm.items():
        assert row.ratio_to_preln == pytest.approx(row.value / preln[what].value)
        assert preln[what].ratio_to_preln == 1
    # per block: the stream, two errors, two projected keys, innovations and importances
    kept = 32 * 4 * (64 + 2 * (64 + 8 * (4 + 2)))
    assert ldm["slope_per_block"].value == pytest.approx(kept, rel=0.25)
    write_rows(rows, tmp_path / "rows.json")
    assert list(json.loads((tmp_path / "rows.json").read_text())[0]) == KEYS
    plot_memory([row for row in rows if row.what == "temporary_bytes"], tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_step_rows_compare_with_the_same_recomputation(small):
    rows = list(bench.step_rows([Backward.REVERSIBLE], [Form.RECURRENT], [4], 1, 1))
    assert [(row.mixer, row.backward) for row in rows] == [("preln", "remat"), ("ldm", "reversible")]
    assert rows[1].ratio_to_preln == pytest.approx(rows[1].value / rows[0].value)


@without_tpu_compiler
def test_no_tpu_compiler():
    with pytest.raises(UserError, match=re.escape("pip install -e '.[tpu]'")):
        tpu_chip("v5e:2x2")


def test_what_does_not_fit_is_a_row_without_a_value(small, monkeypatch, capsys):
    def refuse(config, chip):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: ran out of memory")

    monkeypatch.setattr(compiled, "compile_gradient", refuse)
    rows = print_rows(bench.memory_rows(None, [Backward.STORED], [Form.RECURRENT], [4], (2, 4)), "a title")
    assert {(row.value, row.ratio_to_preln) for row in rows} == {(None, None)}
    assert "does not fit" in capsys.readouterr().out


def test_write_rows(small):
    rows = list(bench.write_rows([3], 1))
    assert [row.what for row in rows] == ["write_seconds", "copy_seconds"]
    assert all(row.value > 0 for row in rows)


def test_loader_rows(tmp_path, capsys):
    for index in range(20):
        (tmp_path / f"{index}.txt").write_text(f"document {index} " * 20)
    config = Config(
        ModelConfig(depth=1, width=16, heads=2, mlp_width=16),
        MixerConfig(MixerKind.PRELN),
        DataConfig(path=f"{tmp_path}/*.txt", context=16, validation_fraction=0.2),
    )
    rows = print_rows(loader_rows(config, 1), "a title")
    assert [row.what for row in rows] == ["loader", "step"]
    assert all(row.value > 0 for row in rows)
    assert capsys.readouterr().out.count(" tokens/s") == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("step --tpu v5e:2x2", "step is measured on this machine: leave --tpu out"),
        ("step --plot x.png", "the picture is one of memory on this machine"),
        ("step --forms fused", "the form fused is for TPUs"),
        ("step --depths 7", "step takes no depths: leave --depths out"),
        ("write --forms dual", "write takes no forms"),
        ("step --config x.toml", "step takes no config: leave --config out"),
        ("loader --modes reversible", "loader takes no modes: leave --modes out"),
        ("loader --config nothing.toml", "there is no config file nothing.toml"),
        ("memory --dtypes float32", "memory takes no dtypes"),
        ("memory --depths 4 4", r"depths are \(4, 4\), but they must be at least 1 and rise"),
        ("memory --modes", "--modes is empty: name some, or leave it out"),
        ("memory --key-dims 0", "key_dims is 0, but it must be at least 1"),
        ("write --repetitions 0", "repetitions is 0"),
        ("write --json /nowhere/x.json", "/nowhere/x.json cannot be written: /nowhere is no folder"),
    ],
)
def test_what_the_script_refuses(monkeypatch, flags, words):
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags.split()])
    with pytest.raises(UserError, match=words):
        runpy.run_path(str(SCRIPT))["main"]()


def test_a_refusal_is_one_sentence():
    done = subprocess.run([sys.executable, str(SCRIPT), "traffic"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: traffic is counted by the TPU compiler: add --tpu v5e:2x2")


@pytest.mark.slow
@with_tpu_compiler
def test_traffic_and_temporaries_on_a_tpu(tmp_path):
    command = [sys.executable, str(SCRIPT), "traffic", "--tpu", "v5e:2x2", "--modes", "reversible"]
    subprocess.run(
        [*command, "--dtypes", "float32", "--forms", "dual", "fused", "--json", str(tmp_path / "rows.json")], check=True
    )
    rows = json.loads((tmp_path / "rows.json").read_text())
    moved = {row["form"]: row["ratio_to_preln"] for row in rows if row["what"] == "hbm_bytes"}
    assert moved["dual"] < 2
    assert moved["fused"] < 2.3
