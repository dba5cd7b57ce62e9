"""How long work reports where it is: the library calls a `Progress`, the command line decides what it looks like."""

from collections.abc import Callable
from typing import Any, Protocol


class Progress(Protocol):
    """A bar; `tqdm.tqdm` is one."""

    def update(self, n: float = 1) -> Any: ...
    def set_postfix_str(self, s: str = "", refresh: bool = True) -> Any: ...
    def close(self) -> Any: ...


Bars = Callable[..., Progress]
"""Makes a bar: `bars(total=, desc=, unit=, initial=)`, with any further keyword that `tqdm.tqdm` takes."""


class _Silent:
    def update(self, n: float = 1) -> None: ...
    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None: ...
    def close(self) -> None: ...


def silent(**kwargs: Any) -> Progress:
    """Bars that show nothing."""
    return _Silent()
