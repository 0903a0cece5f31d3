"""Configs as TOML files: read strictly, written whole."""

import dataclasses
import difflib
import enum
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from ldm_jax.config import Config
from ldm_jax.errors import UserError


def read_config(path: Path) -> Config:
    """The config in a TOML file; what it leaves out has its default.

    Raises:
        UserError: no such file, invalid TOML, an unknown key, a wrong type or an inadmissible value.
    """
    return _from_table(Config, _read_table(path), str(path), ())


def _read_table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no config file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the config file {path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error


def read_variants(path: Path) -> dict[str, Config]:
    """The configs by name in a file: one named after it, or, where it has `base` and `variants`, one for each variant.

    `base` is another config file, beside this one; the file's own sections have what differs from it in all variants,
    `[variants.NAME]` what differs in one.

    Raises:
        UserError: as `read_config`.
    """
    table = _read_table(path)
    if "variants" not in table:
        return {path.stem: _from_table(Config, table, str(path), ())}
    base, variants = table.pop("base", None), table.pop("variants")
    if not isinstance(base, str) or not isinstance(variants, dict):
        raise UserError(f"{path} has variants, so it takes base, the name of a file, and tables [variants.NAME].")
    base = _merged(_read_table(path.parent / base), table)
    return {
        name: _from_table(Config, _merged(base, changes), f"{path}, variant {name}", ())
        for name, changes in variants.items()
    }


def read_methods(files: Sequence[Path]) -> dict[str, Config]:
    """The configs by name in several files.

    Raises:
        UserError: as `read_variants`; no file; a name twice.
    """
    methods: dict[str, Config] = {}
    for file in files:
        for name, config in read_variants(file).items():
            if name in methods:
                raise UserError(f"there are two configs named {name}; the second is in {file}: rename one.")
            methods[name] = config
    if not methods:
        raise UserError("there is no config: give some, such as configs/compare/*.toml.")
    return methods


def _merged(base: Any, changes: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {name: _merged(base.get(name), value) for name, value in changes.items()}


def config_to_toml(config: Config) -> str:
    """The whole config, defaults included, as TOML. Options that are None are left out."""
    return tomli_w.dumps(config_to_table(config))


def options_in_use(config: Config) -> dict[str, Any]:
    """The whole config as nested dictionaries, without the options of mixers that it has not."""
    table = config_to_table(config)
    mixer, kind = table["mixer"], table["mixer"]["kind"]
    used = {name: value for name, value in mixer.items() if name == kind or not isinstance(value, dict)}
    return {**table, "mixer": used}


def config_to_table(config: Any) -> dict[str, Any]:
    """The same as nested dictionaries."""
    table = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            table[field.name] = config_to_table(value)
        elif value is not None:
            table[field.name] = value.value if isinstance(value, enum.Enum) else value
    return table


def options_by_name(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every option of a config as `train.steps`, those that are None, too. Of a section: with its name as prefix."""
    options = {}
    for field in dataclasses.fields(config):
        name, value = f"{prefix}.{field.name}".lstrip("."), getattr(config, field.name)
        options |= options_by_name(value, name) if dataclasses.is_dataclass(value) else {name: value}
    return options


def _from_table(cls: type, table: Any, file: str, keys: tuple[str, ...]) -> Any:
    where = f"{file}: " + (f"[{'.'.join(keys)}]" if keys else "the file")
    if not isinstance(table, dict):
        raise UserError(f"{where} is {table!r}, but it must be a table.")
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    values = {}
    for name, value in table.items():
        if name not in names:
            if not keys and name in ("base", "variants"):
                raise UserError(f"{where} has {name}: files with variants are for scripts/compare.py.")
            close = difflib.get_close_matches(name, names, 1)
            meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}."
            raise UserError(f"{where} has an unknown key {name}: {meant}")
        if dataclasses.is_dataclass(hints[name]):
            values[name] = _from_table(hints[name], value, file, (*keys, name))
        else:
            values[name] = _from_value(hints[name], value, f"{file}: {'.'.join((*keys, name))}")
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _from_value(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):  # X | None; TOML has no null, so the value is an X
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is tuple:  # of any length, of one type
        if not isinstance(value, list):
            raise UserError(f"{where} is {value!r}, but it must be a list.")
        kind = typing.get_args(hint)[0]
        return tuple(_from_value(kind, element, f"{where}, element {n}") for n, element in enumerate(value, 1))
    if issubclass(hint, enum.Enum):
        if value not in [choice.value for choice in hint]:
            raise UserError(
                f"{where} is {value!r}, but it must be one of {', '.join(choice.value for choice in hint)}."
            )
        return hint(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        raise UserError(f"{where} is {value!r}, but it must be {kinds[hint]}.")
    return value
