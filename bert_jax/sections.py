"""Typed configs and options: frozen dataclasses whose fields check their names, types and ranges.

@dataclass(frozen=True)
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
import re
import types
from collections import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from bert_jax.errors import InputError

_UNIONS = (types.UnionType, Union)
_PHASE_KEY = re.compile(r"((?:.+\.)?phases)\.([0-9]{1,9})\.(.+)")


@dataclass(frozen=True)
class Must:
    """A condition on the value of a key. `expected` completes "must be"."""

    expected: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Section:
    """Base of configs and of their sections.

    A value is converted to the type of its field: a text is parsed, a list is also a tuple, an int also a float, and a
    mapping also a section. InputError, with the key, for one of another type or out of range.
    """

    def __post_init__(self) -> None:
        for field, (name, kind) in zip(dataclasses.fields(self), kinds(type(self)).items(), strict=True):
            value = getattr(self, name)
            default = field.default
            example = f", such as {default}" if isinstance(default, (int, float, str)) and default != "" else ""
            try:
                converted = _converted(kind, value)
            except InputError as error:
                raise InputError(f"{name}.{error}") from error
            except (ValueError, KeyError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError) as error:
                raise InputError(f"{name}={value!s:.80}: expected {_expected(kind, example)}") from error
            for must in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
                if not must.holds(converted):
                    raise InputError(f"{name}={value!s:.80}: must be {must.expected}{example}")
            object.__setattr__(self, name, converted)


S = TypeVar("S", bound=Section)


def kinds(section: type[Section]) -> dict[str, Any]:
    """Returns the type of each field of a section, with its conditions."""
    hints = get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def _converted(kind: Any, value: Any) -> Any:
    """Returns a value as the type of an annotation. Raises the errors that `Section` catches if it has another."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _converted(inner[0], value)
    if origin in _UNIONS:
        first, second = inner
        try:
            return _converted(second, value)
        except (ValueError, KeyError, TypeError):
            return _converted(first, value)
    if origin is tuple:
        values = ast.literal_eval(value) if isinstance(value, str) else value
        if type(values) in (int, float):  # one entry, typed without a comma
            values = (values,)
        if not isinstance(values, (tuple, list)):
            raise ValueError
        return tuple(_item(inner[0], number, one) for number, one in enumerate(values))
    if origin is abc.Mapping:
        return {_converted(inner[0], key): _item(inner[1], key, one) for key, one in dict(value).items()}
    if kind is bool and not isinstance(value, bool):
        return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
    if kind is int:
        number = ast.literal_eval(value) if isinstance(value, str) else value
        if isinstance(number, bool) or number != int(number) or abs(number) >= 1 << 63:
            raise ValueError
        return int(number)
    if kind is float and not isinstance(value, bool):
        return float(value)
    if kind is Any:
        return value
    if isinstance(kind, type) and issubclass(kind, Section) and isinstance(value, Mapping):
        return from_mapping(kind, value)
    if kind is str and isinstance(value, os.PathLike):
        return str(value)
    if value not in inner if origin is Literal else not isinstance(value, kind):
        raise ValueError
    return value


def _item(kind: Any, name: object, value: Any) -> Any:
    try:
        return _converted(kind, value)
    except InputError as error:
        raise InputError(f"{name}.{error}") from error


def _names(kind: Any) -> list[str]:
    """Returns the texts of all values of a type; empty if it has too many."""
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return [name or '""' for name in get_args(kind)]
    parts = [_names(one) for one in get_args(kind)] if get_origin(kind) in _UNIONS else []
    return [name for names in parts for name in names] if all(parts) else []


def _expected(kind: Any, example: str) -> str:
    """Describes the values of a type, by all of them or by one."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if kind is not bool and (names := _names(kind)):
        return f"one of {', '.join(names)}"
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return f"a tuple of {'dicts' if get_origin(item) is abc.Mapping else f'{item.__name__} values'}"
    if get_origin(kind) is abc.Mapping:
        return "a dict"
    return f"a value of type {kind.__name__ if isinstance(kind, type) and not get_args(kind) else kind}{example}"


def check_kind(config: object, kind: type[Section]) -> None:
    """Raises InputError for a config that is not of the class `kind`, such as the name of one."""
    if not isinstance(config, kind):
        raise InputError(
            f"config: expected a {kind.__name__}, got {type(config).__name__}; use "
            f"load_config(NAME, kind=bert_jax.{kind.__name__})"
        )


def flatten(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every key."""
    for name in kinds(type(section)):
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def from_mapping(kind: type[S], values: Mapping[str, Any]) -> S:
    """Makes a config or a section; keys that are missing have their defaults. Raises InputError as `with_values`."""
    known = kinds(kind)
    for name in values:
        if name not in known:
            raise InputError(f"{name}: unknown key{nearest(str(name), known)}")
    return kind(**values)


def with_values(section: S, values: Mapping[str, Any]) -> S:
    """Returns the section with other values, by dotted key.

    `phases.1.KEY` is a key of one phase, and `NAME.KEY` an entry of a field that is a mapping.

    Raises InputError, with the key, for an unknown one and for an invalid value.
    """
    known = dict(flatten(section))
    of_phases = {key: match for key in values if (match := _PHASE_KEY.fullmatch(key)) and match[1] in known}
    tree = to_dict(section)
    for key in values.keys() - of_phases.keys():
        if key not in known and not isinstance(known.get(key.partition(".")[0]), Mapping):
            raise InputError(f"{key}: unknown key{nearest(key, known)}")
        *parents, name = key.split(".") if key in known else key.split(".", 1)
        functools.reduce(operator.getitem, parents, tree)[name] = values[key]
    result = from_mapping(type(section), tree)
    for key, match in of_phases.items():
        result = _with_phase_key(result, match[1].split("."), int(match[2]), match[3], values[key])
    return result


def _with_phase_key(section: S, place: list[str], number: int, key: str, value: Any) -> S:
    """Returns the section with another value of one key of phase `number`; its phases are at `place`."""
    where = f"{'.'.join(place)}.{number}"
    owner: Any = functools.reduce(getattr, place[:-1], section)
    tree: Any = to_dict(section)
    phases = functools.reduce(operator.getitem, place, tree)
    if number >= len(phases):
        raise InputError(f"{where}.{key}: the config has {len(phases)} phases, numbered from 0")
    try:
        converted = _converted(int, value) if key == "steps" else dict(flatten(with_values(owner, {key: value})))[key]
    except InputError as error:
        raise InputError(f"{where}.{error}") from error
    except (ValueError, TypeError, SyntaxError) as error:
        raise InputError(f"{where}.steps={value}: expected a value of type int") from error
    phases[number][key] = converted  # of the copy
    return from_mapping(type(section), tree)


def to_dict(section: Section) -> dict[str, Any]:
    """Returns the config as nested dicts, as its JSON has it."""
    return dataclasses.asdict(section)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a "did you mean" hint with the key whose last part is the most similar to that of `name`; "" if none."""
    by_last = {other.rpartition(".")[2]: other for other in known}
    close = difflib.get_close_matches(name.rpartition(".")[2], list(by_last), 1, 0.6)
    return f" (did you mean {by_last[close[0]]}?)" if close else ""


def option(default: Any, help: str, **limits: Any) -> Any:
    """Declares a field as an option of the command line. `limits` are `choices`, `low`, `high` and a `metavar`."""
    return dataclasses.field(default=default, metadata={"help": help, **limits})


class CheckedOptions:
    """Base of dataclasses of options, whose values are checked."""

    def __post_init__(self) -> None:
        """Raises InputError for a field that is not among its choices or not in its range."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, limits = getattr(self, field.name), field.metadata
            low, high = limits.get("low"), limits.get("high")
            if "choices" in limits and value not in limits["choices"]:
                raise InputError(f"{field.name}={value!r}: expected one of {', '.join(limits['choices'])}")
            if low is not None and high is None and not value >= low:
                raise InputError(f"{field.name}={value}: must be at least {low}")
            if high is not None and not low <= value <= high:
                raise InputError(f"{field.name}={value}: must be in [{low}, {high}]")

    def check_unused(self, used: Collection[str], why: str) -> None:
        """Raises InputError, which says `why`, for an option that is not `used` and not at its default."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name not in used and value != field.default:
                given = field.name if value is True else f"{field.name}={value}"
                raise InputError(f"{given}: has no effect {why}")
