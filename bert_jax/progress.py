"""Progress reporting: the library updates bars, and the command line chooses how to show them."""

import functools
from collections.abc import Callable
from typing import Any

import tqdm

Bars = Callable[..., Any]
"""Makes a progress bar: `bars(total=, desc=, unit=, initial=)`, with any further keyword that `tqdm.tqdm` takes."""

silent: Bars = functools.partial(tqdm.tqdm, disable=True)
"""Makes a progress bar that shows nothing."""
