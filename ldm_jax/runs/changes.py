"""What differs between the config of a run's last checkpoint and the one that the run is resumed with."""

import dataclasses
from collections.abc import Container
from typing import Any, NamedTuple

from ldm_jax.config import AttentionImplementation, Config
from ldm_jax.config.toml import options_by_name, unused_options

EXECUTION = {
    "data.verify",
    "mixer.backward",
    "mixer.ldm.form",
    "model.attention",
    "model.loss_chunk",
    "model.remat",
    "model.scan",
}
"""Options of model, mixer and data that decide how something is computed, and not what."""
WINDOWS = {"data.context", "data.separate_documents"}
"""Options of data that decide how text is cut into windows; the others select the text."""


class Changes(NamedTuple):
    """Phrases such as "model.depth was 4 and is now 6", for the options in use."""

    model: list[str]
    """What a checkpoint does not fit: the function, the windows, the structure of the state, the order of the data."""
    text: list[str]
    """Options that select the text."""
    others: list[str]


def find_changes(old: Config, new: Config, trained: bool = True) -> Changes:
    """Compares two configs, apart from the options of mixers that are not used.

    A run that no longer names the run it was started from (`train.init`) has not changed.

    Args:
        old: the config of a checkpoint.
        new: the config that the run is resumed with.
        trained: False for an imported model that has not been trained: only its `[model]` and `[mixer]` must stay.
    """
    if not trained:
        old = dataclasses.replace(new, model=old.model, mixer=old.mixer)
    new = with_init(new, old)
    used = [_without(options_by_name(config), unused_options(config)) for config in (old, new)]
    text = [name for name in used[1] if name.startswith("data.") and name not in EXECUTION | WINDOWS]
    model = _phrases(*(_model(options, text) for options in used))
    return Changes(
        model,
        _phrases(*({name: options[name] for name in text} for options in used)),
        [] if model else _phrases(*(_without(options, text) for options in used)),
    )


def with_init(config: Config, saved: Config) -> Config:
    """The config with `train.init` of the saved one, if it has none itself: a run keeps the name of its origin."""
    if config.train.init is not None:
        return config
    return dataclasses.replace(config, train=dataclasses.replace(config.train, init=saved.train.init))


def _model(options: dict[str, Any], text: list[str]) -> dict[str, Any]:
    local = options["model.attention"] is AttentionImplementation.LOCAL
    sections = "model.", "mixer.", "data."
    return {
        **{name: value for name, value in _without(options, {*text, *EXECUTION}).items() if name.startswith(sections)},
        "model.attention": "local" if local else "softmax",
        **{name: options[name] for name in ("train.seed", "train.init", "optimizer.train")},
        "optimizer.name": options["optimizer.name"],
        "optimizer.ema > 0": options["optimizer.ema"] > 0,
    }


def _without(options: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _phrases(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    names = dict.fromkeys([*old, *new])
    return [
        f"{name} was {old.get(name)} and is now {new.get(name)}" for name in names if old.get(name) != new.get(name)
    ]
