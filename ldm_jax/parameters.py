"""Declarations of parameters: their sharding, weight decay and optimizer, written where the parameter is made."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from ldm_jax.sharding import Axis, partition
from ldm_jax.typing import DType

Axes = tuple[Axis | None, ...]


class Declaration(NamedTuple):
    """A parameter's sharding, weight decay and optimizer. By default it is replicated, without decay, and AdamW's."""

    axes: Axes = ()
    """Roles of the axes, without the leading depth axis of stacked blocks."""
    decays: bool = False
    """Whether weight decay applies."""
    muon: bool = False
    """Whether Muon updates it; otherwise AdamW does. Muon is for the linear maps of blocks and mixers."""


Path = tuple[str, ...]
Declarations = Mapping[Path, Declaration]
"""The declaration of every parameter of a model, by the parameter's path."""


def declarations_of(model: nnx.Module) -> Declarations:
    """The declarations of a model's parameters. The model may be abstract (`nnx.eval_shape`)."""
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {cast(Path, path): variable.get_metadata().get("declaration", Declaration()) for path, variable in leaves}


def declaration_at(path: tuple[Any, ...], declared: Declarations) -> Declaration | None:
    """The declaration for a leaf of a tree that contains parameters, such as an optimizer state; None if there is none.

    A moment or average has its parameter's path as the end of its own path.
    """
    names = tuple(part.key for part in path if isinstance(getattr(part, "key", None), str))
    ends = (names[start:] for start in range(len(names)))
    return next((declared[end] for end in ends if end in declared), None)


def shardings(tree: Any, mesh: Mesh, declared: Declarations) -> Any:
    """The sharding of every array of a training state, or of another tree that contains parameters by path.

    Moments and averages are sharded like their parameters. Other arrays are replicated.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        declaration = declaration_at(path, declared)
        own = () if declaration is None or not leaf.ndim else declaration.axes
        axes = (None,) * (leaf.ndim - len(own)) + own
        return NamedSharding(mesh, partition(leaf.shape, axes, dict(mesh.shape)))

    return jax.tree_util.tree_map_with_path(one, tree)


def param(value: Float[Array, "..."], *axes: Axis | None, decays: bool = False, muon: bool = False) -> nnx.Param[Any]:
    """Makes a parameter with a declaration."""
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
    """Makes a linear layer with declarations. Weight decay applies to the kernel, not to the bias.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        axes: roles of the kernel's two axes; the bias has the second.
        use_bias: whether to add a bias.
        muon: whether Muon updates the kernel.
        kernel_init: initializer of the kernel; None: LeCun normal, flax's default.
        bias_init: initializer of the bias; None: zeros.
        dtype: compute type; None: the input's type, which accelerators then do not round (`precision="highest"`).
            Parameters are float32.
        rngs: random number generators.
    """
    options: dict[str, Any] = {"kernel_init": kernel_init, "bias_init": bias_init}
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        dtype=dtype,
        precision="highest" if dtype is None else None,
        rngs=rngs,
        kernel_metadata={"declaration": Declaration(axes, decays=True, muon=muon)},
        bias_metadata={"declaration": Declaration(axes[-1:])},
        **{name: init for name, init in options.items() if init is not None},
    )
