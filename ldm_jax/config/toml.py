"""Configs as TOML files: read strictly, written in full."""

import dataclasses
import difflib
import enum
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from ldm_jax.config import Config
from ldm_jax.errors import UserError
from ldm_jax.options import converted

RENAMED_VALUES = {"mixer.backward": {"undone": "reversible", "recomputed": "remat"}}
"""Former values of options, with the present ones: an error says what to write."""
REMOVED_OPTIONS = {"mixer.ldm.read_into": "branch"}
"""Options that were removed, with the value that the code now always has: it is ignored, any other is an error."""

ADDED_OPTIONS = {"model.norm_eps": 1e-6, "model.scale_embedding": True, "optimizer.train": "all"}
"""Options that were added, with the value that stands for what the code did before."""


def read_config(path: Path) -> Config:
    """Reads a config from a TOML file. Options that the file leaves out have their defaults.

    Where the file has `base = "OTHER.toml"`, a path relative to the file, it overrides the values of that file table by
    table. A base may have a base.

    Raises:
        UserError: no such file, invalid TOML, a base that refers back to the file, an unknown key, a wrong type or an
            inadmissible value.
    """
    label, table = _read(path)
    return _from_table(Config, table, label, ())


def read_variants(path: Path) -> dict[str, Config]:
    """Reads the configs of a file by name: one for each table `[variants.NAME]`, else one that is named after the file.

    A table `[variants.NAME]` overrides the rest of the file, base included. Raises UserError as `read_config`.
    """
    label, table = _read(path)
    if "variants" not in table:
        return {path.stem: _from_table(Config, table, label, ())}
    variants = table.pop("variants")
    if not isinstance(variants, dict) or not variants:
        raise UserError(f"{label}: variants is {variants!r}, but it must consist of tables [variants.NAME].")
    return {
        name: _from_table(Config, _merged(table, changes), f"{label}, variant {name}", ())
        for name, changes in variants.items()
    }


def read_methods(files: Sequence[Path]) -> dict[str, Config]:
    """Reads the configs of several files by name. Raises UserError as `read_variants`, or if two share a name."""
    methods: dict[str, Config] = {}
    for file in files:
        for name, config in read_variants(file).items():
            if name in methods:
                raise UserError(f"there are two configs named {name}; the second is in {file}: rename one.")
            methods[name] = config
    if not methods:
        raise UserError("there is no config: give some, such as configs/compare/*.toml.")
    return methods


def parse_config(text: str, label: str) -> Config:
    """Reads a config as `config_to_toml` writes it; `label` names it in errors. Raises UserError as `read_config`."""
    try:
        return _from_table(Config, tomllib.loads(text), label, ())
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{label} is not valid TOML: {error}.") from error


def table_to_config(table: Any, label: str) -> Config:
    """Reads a config as `config_to_table` writes it; `label` names it in errors. Raises UserError as `read_config`."""
    return _from_table(Config, table, label, ())


def config_to_toml(config: Config) -> str:
    """The config as TOML, with defaults. Options that are None are left out."""
    return tomli_w.dumps(config_to_table(config))


def unused_options(config: Config) -> dict[str, Any]:
    """The options of mixers that are not used, by path."""
    kind = config.mixer.kind
    return {
        name: value
        for name, value in options_by_name(config).items()
        if name.startswith("mixer.") and name.count(".") == 2 and not name.startswith(f"mixer.{kind}.")
    }


def config_to_table(config: Any) -> dict[str, Any]:
    """The config as nested dictionaries of TOML's types. Options that are None are left out."""
    table = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            table[field.name] = config_to_table(value)
        elif value is not None:
            table[field.name] = value.value if isinstance(value, enum.Enum) else value
    return table


def options_by_name(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every option by its path, such as `train.steps`, None included. `prefix` is the name of a section."""
    options = {}
    for field in dataclasses.fields(config):
        name, value = f"{prefix}.{field.name}".lstrip("."), getattr(config, field.name)
        options |= options_by_name(value, name) if dataclasses.is_dataclass(value) else {name: value}
    return options


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """How errors name the file, and its table over that of its base."""
    table = _read_table(path)
    base = table.pop("base", None)
    return (f"{path} (base {base})" if base else str(path)), table


def _read_table(path: Path, derived: tuple[Path, ...] = ()) -> dict[str, Any]:
    """As `_read`, with the key base; `derived` are the files that have this one as their base."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no config file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the config file {path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    if "base" not in table:
        return table
    if not isinstance(base := table["base"], str):
        raise UserError(f"{path}: base is {base!r}, but it must be the path of another config file.")
    derived = (*derived, path.resolve())
    if (path.parent / base).resolve() in derived:
        raise UserError(f"{path}: base is {base!r}, which has this file as its own base: remove one of the two.")
    return _merged(_read_table(path.parent / base, derived), table)


def _merged(base: Any, changes: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {name: _merged(base.get(name), value) for name, value in changes.items()}


def _from_table(cls: type, table: Any, file: str, keys: tuple[str, ...]) -> Any:
    where = f"{file}: " + (f"[{'.'.join(keys)}]" if keys else "the file")
    if not isinstance(table, dict):
        raise UserError(f"{where} is {table!r}, but it must be a table.")
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    values = {}
    for name, value in table.items():
        option = ".".join((*keys, name))
        if option in REMOVED_OPTIONS:
            _check_removed(option, value, file)
        elif name not in names:
            if option == "variants":
                raise UserError(f"{where} has variants, which only scripts/compare.py reads.")
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(names)}."
            raise UserError(f"{where} has an unknown key {name}: {hint}")
        elif dataclasses.is_dataclass(hints[name]):
            values[name] = _from_table(hints[name], value, file, (*keys, name))
        else:
            if isinstance(value, str) and (new := RENAMED_VALUES.get(option, {}).get(value)):
                raise UserError(f"{file}: {option} is {value!r}, which is now called {new!r}: write that.")
            try:
                values[name] = converted(option, hints[name], value)
            except ValueError as error:
                raise UserError(f"{file}: {error}") from error
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _check_removed(option: str, value: Any, file: str) -> None:
    if value != (allowed := REMOVED_OPTIONS[option]):
        raise UserError(
            f"{file}: {option} is {value!r}, but the option was removed, and its value is now always {allowed!r}: "
            "delete the line."
        )
