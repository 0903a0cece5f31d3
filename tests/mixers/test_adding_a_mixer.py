"""A mixer is added by its file and one line in the registry, as README of ldm_jax/mixers says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCALED = '''
"""The PreLN stream with a learned weight of every output."""

from dataclasses import dataclass

import jax.numpy as jnp

from ldm_jax.mixers.mixer import Mixer, MixerOptions
from ldm_jax.mixers.preln import PreLNEnds, PreLNLayer
from ldm_jax.parameters import param


@dataclass(frozen=True)
class ScaledConfig(MixerOptions):
    """Options of the mixer scaled."""

    start: float = 1.0
    """The weight at the start."""


class ScaledLayer(PreLNLayer):
    """`h <- h + w f(norm(h))`."""

    def __init__(self, config, stack, place, rngs):
        self.weight = param(jnp.full((), config.start))

    def write(self, state, output):
        """The stream plus the weighted output."""
        return super().write(state, self.weight[...] * output)


MIXER = Mixer("scaled", ScaledConfig, ScaledLayer, lambda config, stack, rngs: PreLNEnds())
'''


@pytest.mark.slow
def test_a_file_and_a_line_make_a_mixer(tmp_path):
    shutil.copytree(ROOT / "ldm_jax", tmp_path / "ldm_jax")
    mixers = tmp_path / "ldm_jax" / "mixers"
    (mixers / "scaled.py").write_text(SCALED)
    registry = (mixers / "registry.py").read_text()
    registry = registry.replace("import attnres,", "import scaled, attnres,", 1)
    registry = registry.replace("    preln.MIXER,\n", "    preln.MIXER,\n    scaled.MIXER,\n", 1)
    (mixers / "registry.py").write_text(registry)

    def run(*options):
        command = [sys.executable, str(ROOT / "scripts/train.py"), str(ROOT / "configs/tiny.toml"), *options]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)

    options = "--mixer.kind", "scaled", "--mixer.scaled.start", "0.5", "--train.steps", "2", "--run", "run"
    trained = run(*options)
    assert trained.returncode == 0, trained.stderr
    assert "start = 0.5" in (tmp_path / "run" / "config.toml").read_text()
    assert "mixer" in trained.stdout
    reversible = run(*options, "--mixer.backward", "reversible", "--run", "reversible")
    assert reversible.returncode == 0, reversible.stderr
    assert "scaled" in run("--mixer.kind", "scald").stderr
