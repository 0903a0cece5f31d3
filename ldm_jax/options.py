"""Typed options: frozen dataclasses whose fields are converted to their declared types, and checked, when created."""

import dataclasses
import enum
import math
import types
import typing
from typing import Any


def check_option_types(options: Any) -> None:
    """Converts every field of a dataclass to its declared type, as `converted` does. Raises ValueError where it can't.

    Called from `__post_init__`, so that a string that is an enum's value becomes the enum's member.
    """
    for name, hint in typing.get_type_hints(type(options)).items():
        object.__setattr__(options, name, converted(name, hint, getattr(options, name)))


def converted(name: str, hint: Any, value: Any) -> Any:
    """The value as its declared type: an enum's value as the member, a list as a tuple, a whole number as a float.

    `hint` is a class, `tuple[X, ...]` of any length, or `X | None`.

    Raises:
        ValueError: the value has another type, or is not a number where a float is declared.
    """
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(choice for choice in typing.get_args(hint) if choice is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} is {value!r}, but it must be a list.")
        element = typing.get_args(hint)[0]
        return tuple(converted(f"{name}, element {n}", element, each) for n, each in enumerate(value, 1))
    if issubclass(hint, enum.Enum) and value in [member.value for member in hint]:
        return hint(value)
    if hint is float and type(value) is int:
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{name} is {value!r}, but it must be {_description(hint)}.")
    if hint is float and math.isnan(value):
        raise ValueError(f"{name} is nan, but it must be a number.")
    return value


def _description(kind: type) -> str:
    if issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    if dataclasses.is_dataclass(kind):
        return f"a {kind.__name__}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[kind]


def check(condition: bool, sentence: str) -> None:
    """Raises ValueError with the sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


def check_at_least(options: object, least: int, *names: str) -> None:
    """Raises ValueError for the first of the named options that is less than `least`."""
    for name in names:
        value = getattr(options, name)
        check(value >= least, f"{name} is {value}, but it must be at least {least}.")
