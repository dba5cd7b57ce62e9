"""Progress reporting for long-running work: the library updates a `Progress`, the command line displays it."""

from collections.abc import Callable
from typing import Any, Protocol


class Progress(Protocol):
    """A progress bar, such as `tqdm.tqdm`."""

    def update(self, n: float = 1) -> Any: ...
    def set_postfix_str(self, s: str = "", refresh: bool = True) -> Any: ...
    def close(self) -> Any: ...


Bars = Callable[..., Progress]
"""Creates a progress bar: `bars(total=, desc=, unit=, initial=)`, with any further keyword of `tqdm.tqdm`."""


class _Silent:
    def update(self, n: float = 1) -> None: ...
    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None: ...
    def close(self) -> None: ...


def silent(**kwargs: Any) -> Progress:
    """Creates a progress bar that displays nothing."""
    return _Silent()
