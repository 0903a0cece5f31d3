"""What README shows is what there is."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from ldm_jax import config
from ldm_jax.mixers import DepthMemory, LDMConfig, MixerKind, init_memory

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_first_snippet_runs_and_is_short():
    assert len(SNIPPETS[0].strip().splitlines()) <= 15
    names = {}
    exec(SNIPPETS[0], names)
    assert names["h"].shape == (8,)
    assert names["M"].shape == (8, 4)
    assert float(jnp.abs(names["M"]).max()) > 0


def test_the_scan_that_undoes_is_the_scan():
    names = {}
    exec(SNIPPETS[0], names)
    expected = names["h"], names["M"], names["P"]
    exec(SNIPPETS[2], names)
    for name, value in zip(("h", "M", "P"), expected, strict=True):
        assert jnp.allclose(names[name], value, rtol=1e-5, atol=1e-6)
    before = names["init_state"](8, 4, alpha=10.0)
    layer = names["weights"][0], names["keys"][0]
    after, kept = names["step"](layer, (jnp.ones(8), *before))
    for found, value in zip(names["undo"](layer, after, kept)[1:], before, strict=True):
        assert jnp.allclose(found, value, atol=1e-5)


def test_the_three_lines_of_the_flax_snippet():
    lines = SNIPPETS[1].strip().splitlines()
    assert lines[0].startswith("from ldm_jax.mixers import DepthMemory, init_memory")
    create, read, write = (line.split("#")[0].strip() for line in lines[2:])

    class Layer(nnx.Module):
        def __init__(self, width, sublayers, *, rngs):
            exec(create, {"DepthMemory": DepthMemory}, {"self": self, **locals()})
            self.linear = nnx.Linear(width, width, rngs=rngs)

        def __call__(self, h, state):
            names = {"self": self, "h": h, "state": state, "f": self.linear, "norm": jnp.tanh}
            exec(read, names)
            exec(write, names)
            return h + names["output"], names["state"]

    def stack(h):
        state = init_memory(h.shape[:-1], 8)
        for seed in range(2):
            h, state = Layer(8, 2, rngs=nnx.Rngs(seed))(h, state)
        return h, state

    h, state = jax.jit(stack)(jax.random.normal(jax.random.key(0), (2, 5, 8)))
    assert h.shape == (2, 5, 8)
    assert float(jnp.abs(state.memory).max()) > 0


def test_the_table_of_options_is_the_config():
    section = TEXT.split("## Options of `ldm`")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", section, re.MULTILINE))
    defaults = {name: str(getattr(LDMConfig(), name)).lower() for name in LDMConfig.__dataclass_fields__}
    defaults["forgetting_floor"] = "1e-3 ** (1 / sublayers)"
    assert rows.keys() == defaults.keys()
    for name, shown in rows.items():
        assert shown == defaults[name] or float(shown) == float(defaults[name]), name


def test_commands_name_what_exists():
    for name in re.findall(r"(?:scripts|configs)/\w+\.(?:py|toml)", TEXT):
        assert (ROOT / name).exists(), name
    for section, field in re.findall(r"--(model|data|train)\.(\w+)", TEXT):
        assert hasattr(getattr(config.Config(), section), field)


def test_the_table_of_mixers_is_the_registry():
    section = TEXT.split("## The rivals")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(MixerKind)
