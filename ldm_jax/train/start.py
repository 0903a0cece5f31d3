"""The first state of a run: a new model, or the parameters of another run."""

from typing import Any

from flax import nnx, traverse_util
from jax.sharding import Mesh

from ldm_jax.config import Config, TrainedPart
from ldm_jax.data import Data
from ldm_jax.errors import UserError
from ldm_jax.infer import Model, load_model, make_evaluate
from ldm_jax.nn import Params, Transformer, model_graph
from ldm_jax.runs.changes import find_changes
from ldm_jax.runs.state import TrainState
from ldm_jax.train.step import make_state, state_shapes


def start(config: Config, data: Data, mesh: Mesh | None) -> tuple[TrainState, list[str]]:
    """The state before the first step, and lines about it.

    With `train.init`, the parameters are those of that run: their moving average, if it has one. Of the mixer, only
    what both runs have is taken, and nothing if the kinds of mixer differ; the rest is that of a new model.

    Raises:
        UserError: there is no such run; it has another tokenizer; parameters have other shapes, or the backbone has
            parameters that the run lacks.
    """
    if config.train.init is None:
        frozen = config.optimizer.train is TrainedPart.MIXER
        note = "warning     optimizer.train is mixer without train.init: the backbone stays as it is initialised"
        return make_state(config, mesh), [note] if frozen else []
    run = load_model(config.train.init, mesh)
    if run.tokenizer.fingerprint != data.tokenizer.fingerprint:
        raise UserError(
            f"the run {run.path} was trained with another tokenizer than that of the data: prepare the data with the "
            "tokenizer of the run, or give another train.init."
        )
    given, lines = _match(run, config)
    changes = [each for each in find_changes(run.config, config).model if each.startswith(("model.", "mixer."))]
    if not changes:
        return make_state(config, mesh, given), lines
    shown = "model.", "mixer." if run.config.mixer.kind is config.mixer.kind else "mixer.kind"
    lines += [f"init        {change}" for change in changes if change.startswith(shown)]
    before = _loss(config, data, run.graph, run.params)
    del run
    state = make_state(config, mesh, given)
    after = _loss(config, data, model_graph(config.model, config.mixer), state.params)
    return state, [
        *lines,
        f"init        held-out loss {before:.4f} nats per token in that run, {after:.4f} at the start",
    ]


def _match(run: Model, config: Config) -> tuple[Params, list[str]]:
    """The parameters of the run that a model of this config takes, and lines that name all others.

    Raises:
        UserError: parameters of both have different shapes, or the run lacks one of the backbone.
    """
    same = run.config.mixer.kind is config.mixer.kind
    old: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(run.params)
    new: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(state_shapes(config).params)
    taken = {path: leaf for path, leaf in old.items() if path in new and (same or "mixer" not in path)}
    missing = [path for path in new if path not in taken]
    wrong = [
        f"{'.'.join(path)} is {_shape(old.get(path))} there, but {_shape(new.get(path))} in this model"
        for path in dict.fromkeys([*new, *old])
        if (path in taken and taken[path].shape != new[path].shape)
        or ("mixer" not in path and (path not in old or path not in new))
    ]
    if wrong:
        raise UserError(
            f"the parameters of the run {run.path} do not fit: {'; '.join(wrong)}. Set the options of [model] and of "
            "the mixer to those of the run, for example by its own config.toml as CONFIG; or give another train.init."
        )
    count = sum(leaf.size for leaf in taken.values())
    average = ", moving average" if run.averaged else ""
    lines = [f"init        {count:,} parameters of {run.path}, step {run.step}{average}"]
    if missing:
        lines.append(f"init        as in a new model: {_names(missing, same)}")
    if unused := [path for path in old if path not in taken]:
        lines.append(f"init        not used: {_names(unused, same)}")
    return traverse_util.unflatten_dict(taken), lines


def _names(paths: list[tuple[str, ...]], in_full: bool) -> str:
    """The names of parameters; those of a whole mixer only by its places, unless they are wanted in full."""
    end = lambda path: path.index("mixer") + 1 if "mixer" in path and not in_full else None  # noqa: E731
    return ", ".join(dict.fromkeys(".".join(path[: end(path)]) for path in paths))


def _shape(leaf: Any) -> str:
    return "absent" if leaf is None else str(list(leaf.shape))


def _loss(config: Config, data: Data, graph: nnx.GraphDef[Transformer], params: Params) -> float:
    """The loss that the run's validation measures."""
    size = config.train.batch_size // config.train.accumulation
    return make_evaluate(graph, size)(params, data.validation_windows(config.train.validation_windows)).loss
