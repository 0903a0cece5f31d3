"""How a parameter is sharded, whether it decays, and whether Muon takes it: declared where the parameter is made."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from ldm_jax.sharding import Axis, partition
from ldm_jax.typing import DType

Axes = tuple[Axis | None, ...]


class Declaration(NamedTuple):
    """What holds for a parameter beside its value; without one it is whole on every device and a vector."""

    axes: Axes = ()
    """Of its own axes; a stack of blocks has one more, the first."""
    decays: bool = False
    """Whether weight decay applies."""
    muon: bool = False
    """Whether it is a linear map of a block or of the mixer, which Muon orthogonalises; the others are AdamW's."""


Declarations = Mapping[tuple[str, ...], Declaration]
"""Of every parameter of a model, by the names on its path."""


def declarations_of(model: nnx.Module) -> Declarations:
    """The declarations of a model's parameters; the model may hold shapes only."""
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {
        tuple(map(str, path)): variable.get_metadata().get("declaration", Declaration()) for path, variable in leaves
    }


def declaration_at(path: tuple[Any, ...], declared: Declarations) -> Declaration | None:
    """That of the parameter at a path of a tree, such as an optimiser's state, or None for what is no parameter.

    Moments and averages have their parameter's path at the end of their own.
    """
    names = tuple(part.key for part in path if isinstance(getattr(part, "key", None), str))
    ends = (names[start:] for start in range(len(names)))
    return next((declared[end] for end in ends if end in declared), None)


def shardings(tree: Any, mesh: Mesh, declared: Declarations) -> Any:
    """The sharding of every array of a training state, or of another tree that holds parameters by their names.

    Moments and averages are sharded as their parameters; what is no parameter is whole on every device.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        declaration = declaration_at(path, declared)
        own = () if declaration is None or not leaf.ndim else declaration.axes
        axes = (None,) * (leaf.ndim - len(own)) + own
        return NamedSharding(mesh, partition(leaf.shape, axes, dict(mesh.shape)))

    return jax.tree_util.tree_map_with_path(one, tree)


def param(value: Float[Array, "..."], *axes: Axis | None, decays: bool = False, muon: bool = False) -> nnx.Param[Any]:
    """A parameter with its declaration."""
    return nnx.Param(value, declaration=Declaration(axes, decays, muon))


def linear(
    inputs: int,
    outputs: int,
    axes: Axes,
    *,
    use_bias: bool = False,
    muon: bool = True,
    kernel_init: Any = None,
    bias_init: Any = None,
    dtype: DType | None = jnp.float32,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A linear map `[inputs, outputs]` in a compute type, whose kernel decays and whose bias does not.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        axes: of the kernel; the bias lies along the second.
        use_bias: whether it has a bias.
        muon: whether Muon takes the kernel.
        kernel_init: flax's default if None: LeCun normal.
        bias_init: zeros if None.
        dtype: of the computation; the parameters are float32. None: that of the input.
        rngs: random numbers.
    """
    options: dict[str, Any] = {"kernel_init": kernel_init, "bias_init": bias_init}
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        dtype=dtype,
        rngs=rngs,
        kernel_metadata={"declaration": Declaration(axes, decays=True, muon=muon)},
        bias_metadata={"declaration": Declaration(axes[-1:])},
        **{name: init for name, init in options.items() if init is not None},
    )
