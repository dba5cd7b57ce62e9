import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Literal

import pytest

from bert_jax.errors import InputError
from bert_jax.sections import Must, Section, flatten, with_values


class Inner(Section):
    rate: Annotated[float, Must("above 0", lambda x: 0 < x < math.inf)] = 0.1
    mode: Literal["fast", "exact"] = "fast"


class Outer(Section):
    count: Annotated[int, Must("at least 1", lambda x: x >= 1)] = 3
    flag: bool | Literal["auto"] = "auto"
    shares: tuple[float, ...] = ()
    name: str = ""
    extra: Mapping[str, float] = dataclasses.field(default_factory=dict)
    inner: Inner = Inner()
    share: float | None = None
    phases: tuple[Mapping[str, object], ...] = ()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "1e3", 1000), ("count", 7.0, 7), ("flag", "False", False), ("flag", "auto", "auto"),
        ("flag", False, False),
        ("shares", "(0.5, 1)", (0.5, 1.0)), ("shares", "2", (2.0,)), ("shares", [1, 2], (1.0, 2.0)),
        ("shares", "0,512,1000", (0.0, 512.0, 1000.0)), ("shares", "[0, 7]", (0.0, 7.0)), ("shares", "()", ()),
        ("name", "12", "12"), ("inner.rate", "1", 1.0), ("inner.mode", "exact", "exact"),
        ("extra", {"a": 1}, {"a": 1.0}), ("share", "0.5", 0.5), ("share", "None", None), ("share", None, None),
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
        ("flag", "maybe", "flag=maybe: expected true or false, or one of auto"),
        ("flag", 3, "flag=3: expected true or false, or one of auto"),
        ("shares", "(0.5, 'a')", r"shares\.1=a: expected a value of type float"),
        ("shares", "(" * 500, r"shares=.*: expected a value of type tuple, such as \(0\.1, 0\.2\)$"),
        ("name", 3, "name=3: expected a value of type str"),
        ("share", "none", "share=none: expected a value of type float"),
        ("inner.rate", "nan", "inner.rate=nan: must be above 0"),
        ("inner.rate", False, "inner.rate=False: expected a value of type float"),
        ("inner.mode", "slow", "inner.mode=slow: expected one of fast, exact"),
        ("inner.modes", "fast", r"inner.modes: unknown key \(did you mean inner.mode\?\)"),
        ("inner", "fast", "inner: unknown key"),
        ("phases", "(8,)", r"phases\.0=8: expected a value of type Mapping"),
        ("phases.0.count", "1", "phases.0.count: phases has 0 entries"),
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


def test_entries_of_mappings_are_keys():
    config = with_values(Outer(), {"phases.1.inner.rate": "2", "phases": "({'steps': 3}, {})", "extra.a": "1"})
    assert config.phases == ({"steps": 3}, {"inner.rate": "2"})
    assert config.extra == {"a": 1.0}
