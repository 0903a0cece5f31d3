"""What the scripts share: flags over a config file, one sentence for an error, a cache of compiled programs."""

import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import jax
import tyro

from ldm_jax.config import Config
from ldm_jax.config.toml import read_config
from ldm_jax.errors import UserError
from ldm_jax.files import user_cache
from ldm_jax.parallel import Hosts, ending_together

Arguments = TypeVar("Arguments")
OverConfig = TypeVar("OverConfig", bound="ConfigArguments")
_TYRO_FLAGS = (tyro.conf.EnumChoicesFromValues, tyro.conf.FlagCreatePairsOff)
_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _boolean(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[bool] | None:
    """true and false, as in TOML; Python's spelling, too."""
    if info.type is not bool:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{true,false}",
        instance_from_str=lambda words: {"true": True, "false": False}[words[0].lower()],
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value).lower()],
        choices=("true", "false", "True", "False"),
    )


OverriddenConfig = Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
"""The config whose fields have flags `--section.field`."""


@dataclass(frozen=True)
class ConfigArguments:
    """A config file first, and flags that override it."""

    config_file: tyro.conf.Positional[Path]
    """TOML file, such as configs/quickstart.toml."""
    config: OverriddenConfig = Config()


@dataclass(frozen=True)
class TrainArguments(ConfigArguments):
    """Trains a model as a config file says. Every field of the config has a flag that overrides it."""

    run: Path | None = None
    """Folder of the run; it resumes what it holds. None: runs/NAME for the config file NAME.toml."""
    distributed: str | None = None
    """Training over several hosts, each running this command: HOST:PORT of process 0, or auto where JAX can ask the
    cluster (TPU, SLURM, ...). None: one process."""
    process: int | None = None
    """Index of this process, unless distributed is auto."""
    processes: int | None = None
    """Number of all processes, unless distributed is auto."""
    heartbeat_seconds: int = 60
    """After so many without a sign of life a process is taken for dead, and all others end."""
    join_seconds: int = 300
    """That the processes wait for each other at the start."""

    @property
    def hosts(self) -> Hosts | None:
        """How the processes find each other; None for one process.

        Raises:
            UserError: flags that do not go together.
        """
        if self.distributed is None:
            if self.process is not None or self.processes is not None:
                raise UserError("--process and --processes need --distributed HOST:PORT, where process 0 is found.")
            return None
        try:
            return Hosts(self.distributed, self.process, self.processes, self.heartbeat_seconds, self.join_seconds)
        except ValueError as error:
            raise UserError(str(error)) from error


def parse_train_arguments(arguments: list[str]) -> TrainArguments:
    """As `parse_over_config`."""
    return parse_over_config(TrainArguments, arguments)


def parse_over_config(arguments_type: type[OverConfig], arguments: list[str]) -> OverConfig:
    """The arguments, with the config file's config and the flags' overrides. Exits after `--help` or a wrong flag.

    Raises:
        UserError: the config file is missing or wrong.
    """
    # The file's values are the defaults that the flags override, so it has to be known before they are parsed.
    named = bool(arguments) and not arguments[0].startswith("-")
    config = read_config(Path(arguments[0])) if named else Config()
    file = Path(arguments[0]) if named else tyro.MISSING
    default = arguments_type(config_file=file, config=config)
    try:
        parsed = tyro.cli(arguments_type, args=arguments, default=default, config=_TYRO_FLAGS, registry=_REGISTRY)
    except ValueError as error:  # what concerns several sections is checked last, outside of tyro's reach
        raise UserError(str(error)) from error
    if not named:
        raise UserError(f"the config file comes first: {parsed.config_file} --section.field VALUE ...")
    return parsed


def parse(arguments_type: type[Arguments], arguments: Sequence[str] | None = None) -> Arguments:
    """The arguments, or the command line, as a dataclass. Raises UserError for values that do not go together."""
    try:
        return tyro.cli(arguments_type, args=arguments, config=_TYRO_FLAGS, registry=_REGISTRY)
    except ValueError as error:
        raise UserError(str(error)) from error


def require_matplotlib() -> None:
    """Raises UserError unless pictures can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("pictures need matplotlib: pip install -e '.[plot]'.")


def run_script(main: Callable[[], None], when_interrupted: str = "interrupted.") -> None:
    """Runs a script's main; what a user can mend is printed as one sentence, with exit status 1.

    Args:
        main: parses and calls.
        when_interrupted: the last line after Ctrl-C.
    """
    use_compilation_cache()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes bytes that no terminal knows
    with ending_together():
        _run(main, when_interrupted)


def _run(main: Callable[[], None], when_interrupted: str) -> None:
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = str(error).partition("\n")[0]
        sys.exit(f"error: the memory of the device is not enough ({why}). Take a smaller batch, model or key_dim.")
    except KeyboardInterrupt:
        sys.exit(f"\n{when_interrupted}")
    except BrokenPipeError:  # the reader of our output has left, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX has been told where, or nowhere."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
