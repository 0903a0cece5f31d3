"""What the READMEs show is what there is."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ldm_jax import config
from ldm_jax.mixers import MIXERS, DepthMemory, LDMConfig, init_memory

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("[!.]*/**/README.md"))]
each_readme = pytest.mark.parametrize("readme", READMES, ids=lambda file: str(file.relative_to(ROOT)))


def text(path="."):
    return (ROOT / path / "README.md").read_text()


def snippets(path="."):
    return re.findall(r"```python\n(.*?)```", text(path), re.DOTALL)


def test_the_top_one_is_short():
    assert len(text().splitlines()) <= 150


def test_the_scan_runs():
    names = {}
    exec(snippets()[0], names)
    assert names["h"].shape == (8,)
    assert names["M"].shape == (8, 4)
    assert float(jnp.abs(names["M"]).max()) > 0


def test_the_reversible_scan_is_the_scan():
    names = {}
    exec(snippets()[0], names)
    expected = names["h"], names["M"], names["P"]
    exec(snippets("ldm_jax/memory")[0], names)
    for name, value in zip(("h", "M", "P"), expected, strict=True):
        assert jnp.allclose(names[name], value, rtol=1e-5, atol=1e-6)
    before = names["init_state"](8, 4, alpha=10.0)
    layer = names["weights"][0], names["keys"][0]
    after, residual = names["step"](layer, (jnp.ones(8), *before))
    for found, value in zip(names["undo"](layer, after, residual)[1:], before, strict=True):
        assert jnp.allclose(found, value, atol=1e-5)


def test_the_flax_snippet_gives_every_parameter_a_gradient():
    imports, create, embedding, inside, end = snippets("ldm_jax/mixers")[0].strip().split("\n\n")
    assert imports == "from ldm_jax.mixers import DepthMemory, init_memory"

    class Part(nnx.Module):
        def __init__(self, width, sublayers, *, rngs):
            exec(create, {"DepthMemory": DepthMemory}, {"self": self, **locals()})
            self.linear = nnx.Linear(width, width, rngs=rngs)

        def run(self, lines, **names):
            names |= {"self": self, "f": self.linear, "norm": jnp.tanh, "init_memory": init_memory, "width": 8}
            exec(lines, names)
            return names["h"], names["state"]

    def loss(parts, h):
        h, state = parts[0].run(embedding, h=h)
        for part in parts[1:]:
            h, state = part.run(inside, h=h, state=state)
        return jnp.sum(jnp.sin(parts[0].run(end, h=h, state=state)[0]))

    parts = [Part(8, 3, rngs=nnx.Rngs(seed)) for seed in range(3)]
    gradients = jax.jit(jax.grad(loss))(parts, jax.random.normal(jax.random.key(0), (2, 5, 8)))
    for part in gradients:
        assert all(bool(jnp.any(leaf)) for leaf in jax.tree.leaves(nnx.state(part.memory.reader, nnx.Param)))
        assert all(bool(jnp.any(leaf)) for leaf in jax.tree.leaves(nnx.state(part.memory.writer, nnx.Param)))


def test_the_table_of_options_is_the_config():
    section = text("ldm_jax/mixers").split("## Options of `ldm`")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", section, re.MULTILINE))
    defaults = {name: str(getattr(LDMConfig(), name)).lower() for name in LDMConfig.__dataclass_fields__}
    defaults["forgetting_floor"] = "1e-3 ** (1 / sublayers)"
    assert rows.keys() == defaults.keys()
    for name, shown in rows.items():
        assert shown == defaults[name] or float(shown) == float(defaults[name]), name


@pytest.mark.parametrize("path", [".", "ldm_jax/mixers"])
def test_the_tables_of_mixers_are_the_registry(path):
    table = text(path).split("| `mixer.kind` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [mixer.kind for mixer in MIXERS]


@each_readme
def test_commands_options_and_links_exist(readme):
    for name in re.findall(r"(?:scripts|configs|tests)/[\w/]+\.(?:py|toml)", readme.read_text()):
        assert (ROOT / name).exists(), name
    for section, field in re.findall(r"--(model|data|train|optimizer|log|mesh)\.(\w+)", readme.read_text()):
        assert hasattr(getattr(config.Config(), section), field.replace("-", "_")), field
    for link in re.findall(r"\]\(([^)#:]+)\)", readme.read_text()):
        assert (readme.parent / link).exists(), link
