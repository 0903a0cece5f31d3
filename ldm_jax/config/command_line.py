"""Shared by the scripts: flags that override a config file, errors as one sentence, the compilation cache."""

import dataclasses
import functools
import importlib.util
import io
import os
import signal
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import docstring_parser
import jax
import tyro

from ldm_jax.config import Config
from ldm_jax.config.toml import read_config
from ldm_jax.errors import DivergedError, UserError
from ldm_jax.files import user_cache
from ldm_jax.parallel import Hosts, ending_together

Arguments = TypeVar("Arguments")
OverConfig = TypeVar("OverConfig", bound="ConfigArguments")
DIVERGED_STATUS = 3
"""Exit status of a script whose training diverged; it is 1 after any other error."""
INTERRUPTED_STATUS = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as shells expect it."""
_TYRO_FLAGS = (tyro.conf.EnumChoicesFromValues, tyro.conf.FlagCreatePairsOff)
_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _boolean(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[bool] | None:
    """Flags take true and false as in TOML, or True and False."""
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


@_REGISTRY.primitive_rule
def _path(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Path] | None:
    """In a path, `~` is the home directory, also where the shell has not replaced it."""
    if info.type is not Path:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: Path(os.path.expanduser(words[0])),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda value: [str(value)],
    )


@_REGISTRY.struct_rule
def _dataclass(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
    """Help texts are filled again, as tyro keeps the line breaks of fields' docstrings; defaults differ from values."""
    if not dataclasses.is_dataclass(info.type):
        return None
    hints = typing.get_type_hints(info.type, include_extras=True)
    fields = []
    for field in dataclasses.fields(info.type):
        default = tyro.MISSING if field.default is dataclasses.MISSING else field.default
        value = getattr(info.default, field.name) if isinstance(info.default, info.type) else default
        hint = tyro.conf.arg(help_behavior_hint=functools.partial(_hint, default, value))
        kind: Any = Annotated[hints[field.name], hint]
        help_text = functools.partial(_help_text, info.type, field.name)
        fields.append(tyro.constructors.StructFieldSpec(field.name, kind, value, help_text))
    return tyro.constructors.StructConstructorSpec(info.type, tuple(fields))


def _help_text(cls: type, field: str) -> str | None:
    for base in cls.__mro__[:-1]:
        for documented in docstring_parser.parse_from_object(base).params:
            if documented.arg_name == field:
                return " ".join((documented.description or "").split())
    return None


def _hint(default: Any, value: Any, shown: str) -> str:
    if default is tyro.MISSING:
        return "(required)"
    if value != default:
        return f"(config: {shown}, default: {default})"
    return f"(default: {shown or 'none'})"


OverriddenConfig = Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
"""A config whose fields have flags `--section.field`."""


@dataclass(frozen=True)
class ConfigArguments:
    """A config file, and flags that override it."""

    config_file: tyro.conf.Positional[Path]
    """TOML file, such as configs/quickstart.toml."""
    config: OverriddenConfig = Config()


@dataclass(frozen=True)
class TrainArguments(ConfigArguments):
    """Trains a model from a config file. Every field of the config has a flag that overrides it."""

    run: Path | None = None
    """The run's directory; an unfinished run in it is resumed. None: runs/NAME for the config file NAME.toml."""
    distributed: str | None = None
    """For training on several hosts, each running this command: HOST:PORT of process 0, or auto on a cluster that JAX
    detects (TPU, SLURM, ...). None: one process."""
    process: int | None = None
    """Index of this process. Not with distributed auto."""
    processes: int | None = None
    """Number of processes. Not with distributed auto."""
    heartbeat_seconds: int = 60
    """Seconds without a heartbeat after which a process counts as dead and all others exit."""
    join_seconds: int = 300
    """Seconds to wait for all processes to join."""

    @property
    def hosts(self) -> Hosts | None:
        """How the processes connect; None for one process.

        Raises:
            UserError: the flags contradict each other.
        """
        if self.distributed is None:
            if self.process is not None or self.processes is not None:
                raise UserError("--process and --processes need --distributed HOST:PORT, the address of process 0.")
            return None
        try:
            return Hosts(self.distributed, self.process, self.processes, self.heartbeat_seconds, self.join_seconds)
        except ValueError as error:
            raise UserError(str(error)) from error


def parse_over_config(arguments_type: type[OverConfig], arguments: list[str]) -> OverConfig:
    """Reads the config file that the arguments start with, and overrides it by the flags.

    Exits after `--help` or a wrong flag.

    Raises:
        UserError: the config file is missing or wrong.
    """
    # The file's values are the defaults of the flags, so the file is read before they are parsed.
    named = bool(arguments) and not arguments[0].startswith("-")
    config = read_config(Path(os.path.expanduser(arguments[0]))) if named else Config()
    file = Path(os.path.expanduser(arguments[0])) if named else tyro.MISSING
    default = arguments_type(config_file=file, config=config)
    try:
        parsed = tyro.cli(arguments_type, args=arguments, default=default, config=_TYRO_FLAGS, registry=_REGISTRY)
    except ValueError as error:  # Config checks what concerns several sections; tyro handles the sections' own errors
        raise UserError(str(error)) from error
    if not named:
        raise UserError(f"the config file comes first: {parsed.config_file} --section.field VALUE ...")
    return parsed


def parse(arguments_type: type[Arguments], arguments: Sequence[str] | None = None) -> Arguments:
    """Parses the arguments (None: the command line) into a dataclass. Raises UserError for contradicting values."""
    try:
        return tyro.cli(arguments_type, args=arguments, config=_TYRO_FLAGS, registry=_REGISTRY)
    except ValueError as error:
        raise UserError(str(error)) from error


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates the flags `--section.option VALUE ...` of the config from all other arguments."""
    others: list[str] = []
    overrides: list[str] = []
    part = others
    for argument in arguments:
        if argument.startswith("--"):
            part = overrides if "." in argument.partition("=")[0] else others
        part.append(argument)
    return others, overrides


def override(config: Config, overrides: Sequence[str]) -> Config:
    """The config with flags `--section.option VALUE ...` applied. Raises UserError for contradicting values."""
    flags = (*_TYRO_FLAGS, tyro.conf.FlagConversionOff)
    try:
        return tyro.cli(Config, args=overrides, default=config, config=flags, registry=_REGISTRY)
    except ValueError as error:
        raise UserError(str(error)) from error


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raises UserError unless matplotlib is installed."""
    if not has_matplotlib():
        raise UserError("plots need matplotlib: pip install -e '.[plot]'.")


def run_script(main: Callable[[], None], when_interrupted: str = "interrupted.") -> None:
    """Runs a script's main. A `UserError` is printed as one sentence, with exit status 1 (`DivergedError`: 3).

    After Ctrl-C, `when_interrupted` is printed.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # instead of the handler during the imports
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # generated text need not be valid in the terminal's encoding
    with ending_together():
        _run(main, when_interrupted)


def _run(main: Callable[[], None], when_interrupted: str) -> None:
    try:
        main()
    except UserError as error:
        if isinstance(error, DivergedError) and not jax.distributed.is_initialized():
            print(f"error: {error}", file=sys.stderr)
            sys.exit(DIVERGED_STATUS)
        sys.exit(f"error: {error}")  # in a job of several processes `ending_together` prints it
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = str(error).partition("\n")[0]
        sys.exit(f"error: the device is out of memory ({why}). Use a smaller batch, model or key_dim.")
    except KeyboardInterrupt:
        if jax.distributed.is_initialized():
            sys.exit(when_interrupted)
        print(f"\n{when_interrupted}", file=sys.stderr)
        sys.exit(INTERRUPTED_STATUS)
    except BrokenPipeError:  # the reader of the output has exited, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
