"""Options that a device does not support, and their equivalents: a trained model can be used on any device."""

import dataclasses

import jax

from ldm_jax.config import AttentionImplementation, Config
from ldm_jax.config.toml import options_by_name
from ldm_jax.errors import UserError


def adapt(config: Config) -> tuple[Config, dict[str, str]]:
    """The config with options that this device supports; the parameters and the function stay the same.

    Returns:
        The config; for each option that was replaced, what is not supported, with the new value.
    """
    here, model = jax.default_backend(), config.model
    if model.attention is AttentionImplementation.CUDNN and here != "gpu":
        model = dataclasses.replace(model, attention=AttentionImplementation.XLA)
    mixer = config.mixer.with_options(**config.mixer.options.replacements_on(here))
    adapted = dataclasses.replace(config, model=model, mixer=mixer)
    supported = options_by_name(adapted)
    return adapted, {
        f"{name} is {value}, which JAX on {here} does not support": str(supported[name])
        for name, value in options_by_name(config).items()
        if value != supported[name]
    }


def check_device(config: Config) -> None:
    """Raises UserError if this device does not support an option, because the equivalent may be much slower."""
    for unsupported, equivalent in adapt(config)[1].items():
        raise UserError(f"{unsupported}: set it to {equivalent} to train here.")
