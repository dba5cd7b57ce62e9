"""Typed configs, options and records: frozen dataclasses whose fields check their names, types and ranges.

class DataKeys(Section):
    path: str = ""
    seq_len: Annotated[int, Must("at least 1, or -1", lambda x: x >= 1 or x == -1)] = -1
"""

import ast
import dataclasses
import difflib
import functools
import operator
import os
import types
from collections import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from bert_jax.errors import InputError

UNIONS = (types.UnionType, Union)


@dataclass(frozen=True)
class Must:
    """A condition on the value of a key. `expected` completes "must be"."""

    expected: str
    holds: Callable[[Any], bool]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
@dataclass(frozen=True)
class Section:
    """Base of configs and their sections, options and records, which are frozen dataclasses.

    Values are converted as `checked` says. Raises InputError, with the key, for one of another type or out of range.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    def __post_init__(self) -> None:
        for field, kind in zip(dataclasses.fields(self), kinds(type(self)).values(), strict=True):
            value = checked(field.name, kind, getattr(self, field.name), field.default)
            object.__setattr__(self, field.name, value)

    def check_unused(self, used: Collection[str], why: str) -> None:
        """Raises InputError, which says `why`, for a field that is not `used` and not at its default."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in used and value != field.default:
                raise InputError(f"{field.name}={value}: has no effect {why}")


S = TypeVar("S", bound=Section)


def kinds(section: type[Section]) -> dict[str, Any]:
    """Returns the type of each field of a section, with its conditions."""
    hints = get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def checked(name: str, kind: Any, value: Any, default: object = None) -> Any:
    """Returns a value as an annotation's type: a text is parsed, an int also a float, and a mapping also a section.

    Raises InputError, with the name, for a value of another type or against a condition. It shows the default.
    """
    if types.NoneType in get_args(kind):
        if value in (None, "None"):
            return None
        kind = get_args(kind)[0]
    example = f", such as {default}" if isinstance(default, (int, float, str)) and default != "" else ""
    try:
        converted = _converted(kind, value)
    except InputError as error:
        raise InputError(f"{name}.{error}") from error
    except (ValueError, KeyError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError) as error:
        given = type(value).__name__ if isinstance(value, Section) else value
        raise InputError(f"{name}={given!s:.80}: expected {_expected(kind)}{example}") from error
    for must in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
        if isinstance(must, Must) and not must.holds(converted):
            raise InputError(f"{name}={value!s:.80}: must be {must.expected}{example}")
    return converted


def _converted(kind: Any, value: Any) -> Any:
    """Returns a value as the type of an annotation. Raises the errors that `checked` catches if it has another."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _converted(inner[0], value)
    if origin in UNIONS:
        first, second = inner
        try:
            return _converted(second, value)
        except (ValueError, KeyError, TypeError):
            return _converted(first, value)
    if origin is abc.Sequence and isinstance(value, (str, os.PathLike)):
        value = (value,)
    if isinstance(value, str) and (kind is int or origin in (tuple, abc.Mapping)):
        value = ast.literal_eval(value)
    if origin in (tuple, abc.Sequence):
        values = (value,) if type(value) in (int, float) else value  # one entry, typed without a comma
        if not isinstance(values, (tuple, list)):
            raise ValueError
        return tuple(checked(str(number), inner[0], one) for number, one in enumerate(values))
    if origin is abc.Mapping:
        return {_converted(inner[0], key): checked(str(key), inner[1], one) for key, one in dict(value).items()}
    if kind is bool and not isinstance(value, bool):
        return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
    if kind is int:
        if isinstance(value, bool) or value != int(value) or abs(value) >= 1 << 63:
            raise ValueError
        return int(value)
    if kind is float and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and issubclass(kind, Section) and isinstance(value, Mapping):
        return from_mapping(kind, value)
    if kind is str and isinstance(value, os.PathLike):
        return str(value)
    if kind is not Any and (value not in inner if origin is Literal else not isinstance(value, kind)):
        raise ValueError
    return value


_TUPLES = {int: "(0, 1)", float: "(0.1, 0.2)", str: "('a', 'b')"}
"""Examples of tuples, by the type of their items."""


def plain(kind: Any) -> Any:
    """Returns a type without its conditions."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _expected(kind: Any) -> str:
    """Describes the values of a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _expected(plain(kind))
    if origin is Literal:
        return f"one of {', '.join(str(name) or repr(name) for name in inner)}"
    if origin in UNIONS:
        return ", or ".join(map(_expected, inner))
    if origin is tuple and (example := _TUPLES.get(plain(inner[0]))):
        return f"a value of type tuple, such as {example}"
    return "true or false" if kind is bool else f"a value of type {(origin or kind).__name__}"


def flatten(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every key."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            yield from flatten(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def from_mapping(kind: type[S], values: Mapping[str, Any]) -> S:
    """Makes a config or a section; keys that are missing have their defaults. Raises InputError as `with_values`."""
    known = kinds(kind)
    for name in values:
        if name not in known:
            raise InputError(f"{name}: unknown key{nearest(str(name), known)}")
    return kind(**values)


def with_values(section: S, values: Mapping[str, Any]) -> S:
    """Returns the section with other values, by dotted key.

    `NAME.KEY` is an entry of a field that is a mapping, and `NAME.1.KEY` of the second mapping in a tuple.

    Raises InputError, with the key, for an unknown one and for an invalid value.
    """
    whole = {key: value for key, value in values.items() if key in dict(flatten(section))}
    if 0 < len(whole) < len(values):
        section = with_values(section, whole)  # the entries of a tuple may be new
        values = {key: value for key, value in values.items() if key not in whole}
    known, tree = dict(flatten(section)), to_dict(section)
    for key, value in values.items():
        field = next((name for name in known if f"{key}.".startswith(f"{name}.")), "")
        *parents, name = field.split(".")
        place, entry = functools.reduce(operator.getitem, parents, tree), key[len(field) + 1 :]
        if isinstance(known.get(field), tuple) and "." in entry:
            number, _, entry = entry.partition(".")
            entries = {str(index): one for index, one in enumerate(place[name])}
            if number not in entries:
                raise InputError(f"{key}: {field} has {len(entries)} entries, numbered from 0")
            place, name = entries, number
        if field == key:
            place[name] = value
        elif isinstance(place.get(name), dict):
            place[name][entry] = value
        else:
            raise InputError(f"{key}: unknown key{nearest(key, known)}")
    return from_mapping(type(section), tree)


def to_dict(section: Section) -> dict[str, Any]:
    """Returns the config as nested dicts, as its JSON has it."""
    return dataclasses.asdict(section)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a "did you mean" hint with the key whose last part is the most similar to that of `name`; "" if none."""
    by_last = {other.rpartition(".")[2]: other for other in known}
    close = difflib.get_close_matches(name.rpartition(".")[2], list(by_last), 1, 0.6)
    return f" (did you mean {by_last[close[0]]}?)" if close else ""
