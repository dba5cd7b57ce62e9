"""Jitted programs that the runs of a process share: equal arguments give the same program, traced and compiled once."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import jax

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

KEPT = 32
"""Results that are kept of each function; the least recently used one goes first."""
_forget: list[Callable[[], None]] = []


def shared(make: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function that makes a plan or a jitted program: equal arguments return the first call's result.

    The runs of a study or of a search, and repeated runs of a notebook, trace and compile a program once. Arguments
    are trees with hashable leaves, functions by identity. Do not change a result.
    """

    @functools.lru_cache(maxsize=KEPT)
    def make_once(leaves: tuple[Hashable, ...], types: tuple[type, ...], tree: Any) -> Result:
        arguments, options = jax.tree.unflatten(tree, leaves)
        return make(*arguments, **options)

    _forget.append(make_once.cache_clear)

    @functools.wraps(make)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        leaves, tree = jax.tree.flatten((arguments, options))
        return make_once(tuple(leaves), tuple(map(type, leaves)), tree)  # 1, 1.0 and True are equal

    return call


def forget_programs() -> None:
    """Makes later calls trace and compile anew, such as those after a change of the code."""
    for forget in _forget:
        forget()
