"""The collectives of LDM's memory (argument `memory`) or training step (`steps`), compiled for eight devices.

None of them moves the memory. Prints for each program the collectives by kind, with the shapes that they move.
test_collectives.py reads the last line.
"""

import dataclasses
import json
import math
import os
import re
import sys
from collections import Counter
from typing import NamedTuple

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ldm_jax.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from ldm_jax.data import Batch
from ldm_jax.memory import Observation
from ldm_jax.memory.depth_scan import Backward
from ldm_jax.memory.recurrent import MemoryShape, Recurrent
from ldm_jax.memory.write import Covariance, MemoryState
from ldm_jax.mixers import Form, LDMConfig, MixerConfig, Write
from ldm_jax.nn import model_declarations
from ldm_jax.parallel import make_mesh
from ldm_jax.parameters import shardings
from ldm_jax.roofline.counts import COLLECTIVES
from ldm_jax.sharding import Axis, batch_sharding, partition
from ldm_jax.train import make_state, make_train_step

# Sizes that are unique, also as products and after sharding.
KEY, VALUE, GROUPS = 7, 26, 8
MODEL = ModelConfig(depth=2, width=GROUPS * VALUE, heads=4, mlp_width=48, loss_chunk=64)
LDM = LDMConfig(groups=GROUPS, key_dim=KEY, latent_dim=12)
OBSERVATIONS = MODEL.sublayers + 1
MESHES = [(2, 1, 2, 2), (1, 2, 2, 2)]
FORMS = {
    "recurrent, reversible": MixerConfig(ldm=LDM, backward=Backward.REVERSIBLE),
    "recurrent, stored": MixerConfig(ldm=LDM, backward=Backward.STORED),
    "dual, reversible": MixerConfig(ldm=dataclasses.replace(LDM, form=Form.DUAL), backward=Backward.REVERSIBLE),
}
KINDS = "|".join(COLLECTIVES)


class Collective(NamedTuple):
    """A collective operation and a shape of its result."""

    kind: str
    shape: tuple[int, ...]

    @property
    def moves_memory(self) -> bool:
        """Whether the shape is that of M, P or the dual form's observations, transposed or flattened."""
        sizes = [size for size in self.shape if size > 1]
        whole = {KEY * VALUE, KEY * KEY} & set(sizes)
        seen = OBSERVATIONS in sizes and ({VALUE, KEY} & set(sizes))
        return bool(whole or seen or sizes.count(KEY) > 1 or (KEY in sizes and VALUE in sizes))


def collectives(compiled):
    """The collectives of a compiled program."""
    found = []
    for line in compiled.as_text().splitlines():
        match = re.search(rf" = (.*?) ({KINDS})(-start)?\(", line)
        if match:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            found += [Collective(match[2], tuple(int(n) for n in shape.split(",") if n)) for shape in shapes]
    return found


def largest_memory(compiled):
    """Size of the largest M `[B, T, G, K, V]`, in any order of axes, on one device in a compiled program."""
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}
    return max((math.prod(x) for x in shapes if len(x) == 5 and KEY in x and VALUE in x), default=0)


def compiled_step(mixer, sizes):
    """The compiled training step."""
    train = TrainConfig(batch_size=8)
    config = Config(MODEL, mixer, DataConfig(context=16), train=train, mesh=MeshConfig(*sizes))
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: make_state(config))
        state = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            shapes,
            shardings(shapes, mesh, model_declarations(config.model, config.mixer)),
        )
        window = jax.ShapeDtypeStruct((8, 17), np.int32, sharding=batch_sharding(mesh))
        return make_train_step(config, mesh).lower(state, Batch(window, window)).compile()


def of_memory(write, sizes, *, wrong=False):
    """The collectives of read, write and undo, and of their backward passes, by name.

    With `wrong`, the query is sharded differently than the memory, so that a collective must be found.
    """
    config = Config(MODEL, MixerConfig(ldm=LDM), train=TrainConfig(batch_size=8), mesh=MeshConfig(*sizes))
    mesh, tokens = make_mesh(config), (8, 16, GROUPS)
    form = Recurrent(write.rule, MemoryShape(GROUPS, VALUE, KEY))
    by_group = Axis.BATCH, Axis.TOKENS, Axis.GROUPS

    def array(*own, axes=by_group):
        shape = *tokens, *own
        spec = partition(shape, (*axes, *[None] * len(own)), dict(mesh.shape))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    covariance = None if write.rule.covariance is None else Covariance(array(KEY, KEY), array())
    state = MemoryState(array(KEY, VALUE), covariance)
    observation = Observation(array(KEY), array(VALUE), array(), array())
    query = array(KEY, axes=(Axis.BATCH, Axis.GROUPS, Axis.TOKENS) if wrong else by_group)
    operations = {"read": (form.read, state, query)}
    if not wrong:
        operations["write"] = form.write, state, observation
    found = {}
    with jax.set_mesh(mesh):
        for name, (function, *arguments) in operations.items():

            def pulled(cotangent, *arguments, function=function):
                return jax.vjp(function, *arguments)[1](cotangent)

            compiled = jax.jit(function).lower(*arguments).compile()
            results = jax.tree.map(
                lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
                jax.eval_shape(function, *arguments),
                compiled.output_shardings,
            )
            found[name] = collectives(compiled)
            found[f"{name}, pulled back"] = collectives(jax.jit(pulled).lower(results, *arguments).compile())
            if name == "write" and results[1] is not None:
                undo = jax.jit(form.undo).lower(*results).compile()
                found["undo"] = collectives(undo)
    return found


def table(found):
    """Lines with the kind and number of collectives, and every shape on one device."""
    lines = []
    for kind in sorted({one.kind for one in found}):
        shapes = Counter(one.shape for one in found if one.kind == kind)
        lines.append(f"    {kind}, {sum(shapes.values())}:")
        for shape, count in sorted(shapes.items(), key=lambda item: -math.prod(item[0])):
            lines.append(f"        {count} x {list(shape)}")
    return lines or ["    none"]


def memory() -> dict[str, int]:
    """The number of collectives of each operation, and of one that moves the memory."""
    numbers = {}
    for sizes in MESHES:
        print_mesh(sizes)
        for write in (Write.RLS, Write.SQRT_RLS, Write.ADDITIVE) if sizes == MESHES[0] else (Write.RLS,):
            for name, found in of_memory(write, sizes).items():
                print(f"  {write}: {name}", *table(found), sep="\n")
                numbers[f"{sizes} {write} {name}"] = len(found)
    wrong = of_memory(Write.RLS, MESHES[0], wrong=True)["read"]
    print("a read whose query is sharded differently than the memory", *table(wrong), sep="\n")
    return {**numbers, "wrong": sum(one.moves_memory for one in wrong)}


def steps() -> dict[str, dict[str, int]]:
    """The collectives of each form's training step: all, those that move the memory; and the largest memory."""
    numbers = {}
    for name, mixer in FORMS.items():
        sizes = MESHES[0] if name == "recurrent, reversible" else MESHES[1]  # on one mesh each: they compile for long
        print_mesh(sizes)
        compiled = compiled_step(mixer, sizes)
        found = collectives(compiled)
        print(f"  training step, {name}", *table(found), sep="\n")
        moved = sum(one.moves_memory for one in found)
        numbers[f"{sizes} {name}"] = {"all": len(found), "memory": moved, "largest": largest_memory(compiled)}
    return numbers


def print_mesh(sizes) -> None:
    print(f"mesh {sizes}; shapes of one device; K {KEY}, V {VALUE}, G {GROUPS}, D {MODEL.width}")


if __name__ == "__main__":
    print(json.dumps({"memory": memory, "steps": steps}[sys.argv[1]]()))
