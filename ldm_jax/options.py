"""What every options class has in common: fields of the declared types, checked when it is made."""

import dataclasses
import enum
import math
import types
import typing
from typing import Any


def check_option_types(options: Any) -> None:
    """Raises ValueError unless every field of a dataclass has its declared type, and every float is a number.

    A string that is an enum's value becomes its member: it would compare equal, but not be the same.
    """
    for name, hint in typing.get_type_hints(type(options)).items():
        value = getattr(options, name)
        choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if value is None and types.NoneType in choices:
            continue
        kind = next(choice for choice in choices if choice is not types.NoneType)
        if typing.get_origin(kind) is tuple:
            if not isinstance(value, tuple):
                raise ValueError(f"{name} is {value!r}, but it must be a tuple.")
            for element in value:
                _check_type(f"an element of {name}", element, typing.get_args(kind)[0])
            continue
        if issubclass(kind, enum.Enum) and value in [choice.value for choice in kind]:
            value = kind(value)
            object.__setattr__(options, name, value)
        _check_type(name, value, kind)


def _check_type(name: str, value: Any, kind: type) -> None:
    if kind is float and type(value) is int:
        return
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is {value!r}, but it must be {_described(kind)}.")
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{name} is nan, but it must be a number.")


def _described(kind: type) -> str:
    if issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(choice.value) for choice in kind)
    if dataclasses.is_dataclass(kind):
        return f"a {kind.__name__}"
    return {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}[kind]


def check(condition: bool, sentence: str) -> None:
    """Raises ValueError with the sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


def check_at_least(options: object, least: int, *names: str) -> None:
    """Raises ValueError for the first of the named options that is less."""
    for name in names:
        value = getattr(options, name)
        check(value >= least, f"{name} is {value}, but it must be at least {least}.")
