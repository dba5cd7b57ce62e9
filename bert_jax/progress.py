"""Progress reporting: the library calls a `Progress`, and the command line chooses how to show it."""

from collections.abc import Callable
from typing import Any, Protocol


class Progress(Protocol):
    """Interface of a progress bar; `tqdm.tqdm` implements it."""

    def update(self, n: float = 1) -> Any: ...
    def set_postfix_str(self, s: str = "", refresh: bool = True) -> Any: ...
    def unpause(self) -> Any: ...
    def close(self) -> Any: ...


Bars = Callable[..., Progress]
"""Makes a progress bar: `bars(total=, desc=, unit=, initial=)`, with any further keyword that `tqdm.tqdm` takes."""


class _Silent:
    def update(self, n: float = 1) -> None: ...
    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None: ...
    def unpause(self) -> None: ...
    def close(self) -> None: ...


def silent(**kwargs: Any) -> Progress:
    """Makes a progress bar that shows nothing."""
    return _Silent()
