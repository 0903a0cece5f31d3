"""The benchmarks: their rows and ratios, and the options that they reject."""

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
from ldm_jax.bench.table import plot_memory, print_rows, save_rows
from ldm_jax.bench.throughput import loader_rows
from ldm_jax.config import Config, DataConfig, ModelConfig
from ldm_jax.errors import UserError
from ldm_jax.memory import Backward
from ldm_jax.mixers import Form, MixerConfig, MixerKind
from ldm_jax.roofline.compile import tpu_chip

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"
KEYS = ["what", "mixer", "backward", "form", "key_dim", "depth", "compute_dtype", "value", "unit", "ratio_to_preln"]
without_tpu_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="it is installed")
with_tpu_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "CPU_SIZE", bench.Size(width=64, tokens=32, batch=2))


@pytest.mark.slow
def test_memory_rows(small, tmp_path, capsys):
    rows = list(bench.memory_rows(None, bench.subjects([Backward.REVERSIBLE], [Form.RECURRENT], [4]), (2, 4)))
    print_rows(rows, "a title")
    assert "slope_per_block  ldm    reversible recurrent   4     4" in capsys.readouterr().out
    assert {row.what for row in rows} == {"temporary_bytes", "slope_per_block"}
    preln = {row.what: row for row in rows if (row.mixer, row.backward, row.depth) == ("preln", "remat", 4)}
    ldm = {row.what: row for row in rows if (row.mixer, row.depth) == ("ldm", 4)}
    for what, row in ldm.items():
        assert row.ratio_to_preln == pytest.approx(row.value / preln[what].value)
        assert preln[what].ratio_to_preln == 1
    # per block: the stream, two errors, two projected keys, innovations and importances
    saved = 32 * 4 * (64 + 2 * (64 + 8 * (4 + 2)))
    assert ldm["slope_per_block"].value == pytest.approx(saved, rel=0.25)
    save_rows(rows, tmp_path / "rows.json")
    assert list(json.loads((tmp_path / "rows.json").read_text())[0]) == KEYS
    plot_memory([row for row in rows if row.what == "temporary_bytes"], tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_step_rows_compare_with_the_same_backward_mode(small):
    rows = list(bench.step_rows(bench.subjects([Backward.REVERSIBLE], [Form.RECURRENT], [4]), 1, 1))
    assert [(row.mixer, row.backward) for row in rows] == [("preln", "remat"), ("ldm", "reversible")]
    assert rows[1].ratio_to_preln == pytest.approx(rows[1].value / rows[0].value)


def test_a_cut_off_keeps_the_rows_so_far(tmp_path):
    def rows():
        yield bench.preln().row("step_seconds", 4, 2.0, "seconds", 2.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        print_rows(rows(), "a title", tmp_path / "rows.json")
    assert [row["value"] for row in json.loads((tmp_path / "rows.json").read_text())] == [2.0]


@without_tpu_compiler
def test_no_tpu_compiler():
    with pytest.raises(UserError, match=re.escape("pip install -e '.[tpu]'")):
        tpu_chip("v5e:2x2")


def test_a_program_that_does_not_fit_is_a_row_without_a_value(small, monkeypatch, capsys):
    def compile_without_memory(lowered, compiler_options=None):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: ran out of memory")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_without_memory)
    rows = print_rows(bench.memory_rows(None, [], (1, 2)), "a title")  # PreLN alone
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
    assert [(row.what, row.backward) for row in rows] == [("loader", "reversible"), ("step", "reversible")]
    assert all(row.value > 0 for row in rows)
    assert capsys.readouterr().out.count(" tokens/s") == 2


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("step --tpu v5e:2x2", "--tpu"),
        ("step --plot x.png", "--plot"),
        ("step --forms fused", "fused"),
        ("step --depths 7", "depths"),
        ("write --forms dual", "forms"),
        ("step --config x.toml", "config"),
        ("loader --modes reversible", "modes"),
        ("loader --config nothing.toml", "nothing.toml"),
        ("memory --dtypes float32", "dtypes"),
        ("memory --depths 4 4", r"depths.*\(4, 4\)"),
        ("memory --modes", "--modes is empty"),
        ("memory --key-dims 0", "key_dims is 0"),
        ("write --repetitions 0", "repetitions is 0"),
        ("write --json /nowhere/x.json", "/nowhere/x.json"),
        ("memory --plot /proc/x.png", "/proc/x.png"),
        ("memory --plot x.jpgg", "x.jpgg"),
    ],
)
def test_invalid_options(monkeypatch, flags, named):
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags.split()])
    with pytest.raises(UserError, match=named):
        runpy.run_path(str(SCRIPT))["main"]()


def test_an_error_is_one_line():
    done = subprocess.run([sys.executable, str(SCRIPT), "traffic"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*--tpu.*\n", done.stderr)


@pytest.mark.slow
@with_tpu_compiler
def test_hbm_bytes_on_a_tpu(tmp_path):
    command = [sys.executable, str(SCRIPT), "traffic", "--tpu", "v5e:2x2", "--modes", "reversible"]
    subprocess.run(
        [*command, "--dtypes", "float32", "--forms", "dual", "fused", "--json", str(tmp_path / "rows.json")], check=True
    )
    rows = json.loads((tmp_path / "rows.json").read_text())
    ratios = {row["form"]: row["ratio_to_preln"] for row in rows if row["what"] == "hbm_bytes"}
    assert ratios["dual"] < 2
    assert ratios["fused"] < 2.3
