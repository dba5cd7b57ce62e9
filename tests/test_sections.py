import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from bert_jax.errors import InputError
from bert_jax.sections import Must, Section, flatten, with_values


@dataclass(frozen=True)
class Inner(Section):
    rate: Annotated[float, Must("above 0", lambda x: 0 < x < math.inf)] = 0.1
    mode: Literal["fast", "exact"] = "fast"


@dataclass(frozen=True)
class Outer(Section):
    count: Annotated[int, Must("at least 1", lambda x: x >= 1)] = 3
    flag: bool | Literal["auto"] = "auto"
    shares: tuple[float, ...] = ()
    name: str = ""
    extra: Mapping[str, float] = dataclasses.field(default_factory=dict)
    inner: Inner = Inner()
    phases: tuple[Mapping[str, object], ...] = ()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "1e3", 1000), ("count", 7.0, 7), ("flag", "False", False), ("flag", "auto", "auto"),
        ("shares", "(0.5, 1)", (0.5, 1.0)), ("shares", "2", (2.0,)), ("shares", [1, 2], (1.0, 2.0)),
        ("name", "12", "12"), ("inner.rate", "1", 1.0), ("inner.mode", "exact", "exact"),
        ("extra", {"a": 1}, {"a": 1.0}),
    ],
)  # fmt: skip
def test_a_value_has_the_type_of_its_key(key: str, text: object, value: object):
    found = dict(flatten(with_values(Outer(), {key: text})))[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("count", "1.5", "count=1.5: expected a value of type int"),
        ("count", True, "count=True: expected a value of type int"),
        ("count", "inf", "count=inf: expected a value of type int"),
        ("count", 0, "count=0: must be at least 1"),
        ("flag", "maybe", "flag=maybe: expected one of true, false, auto"),
        ("flag", 3, "flag=3: expected one of true, false, auto"),
        ("shares", "(0.5, 'a')", "shares=.*: expected a tuple of float values"),
        ("shares", "(" * 500, r"shares=.*: expected a tuple of float values"),
        ("name", 3, "name=3: expected a value of type str"),
        ("inner.rate", "nan", "inner.rate=nan: must be above 0"),
        ("inner.rate", False, "inner.rate=False: expected a value of type float"),
        ("inner.mode", "slow", "inner.mode=slow: expected one of fast, exact"),
        ("inner.modes", "fast", r"inner.modes: unknown key \(did you mean inner.mode\?\)"),
        ("inner", "fast", "inner: unknown key"),
        ("phases", "(8,)", r"phases=\(8,\): expected a tuple of dicts"),
        ("phases.0.count", "1", "phases.0.count: the config has 0 phases"),
    ],
)
def test_another_value_is_refused_with_key_value_and_expectation(key: str, value: object, message: str):
    with pytest.raises(InputError, match=f"^{message}"):
        with_values(Outer(), {key: value})


def test_a_section_checks_itself_however_it_is_made():
    with pytest.raises(InputError, match=r"^rate=-1: must be above 0"):
        Inner(rate=-1)
    with pytest.raises(InputError, match=r"^mode=slow: "):
        dataclasses.replace(Inner(), mode="slow")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Outer().count = 4


def test_keys_of_a_phase_have_the_types_of_the_keys():
    config = with_values(Outer(), {"phases": "({'steps': 3}, {'steps': -1})"})
    config = with_values(config, {"phases.1.inner.rate": "2", "phases.0.steps": "4"})
    assert config.phases == ({"steps": 4}, {"steps": -1, "inner.rate": 2.0})
    with pytest.raises(InputError, match=r"^phases\.1\.inner\.rate=0: must be above 0"):
        with_values(config, {"phases.1.inner.rate": 0})
    with pytest.raises(InputError, match=r"^phases\.1\.inner\.rat: unknown key \(did you mean inner\.rate\?\)"):
        with_values(config, {"phases.1.inner.rat": 1})
