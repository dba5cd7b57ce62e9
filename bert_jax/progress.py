"""Work in progress: its cores, its bars, which the command line chooses how to show, and its log."""

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tqdm

Bars = Callable[..., Any]
"""Makes a progress bar: `bars(total=, desc=, unit=, initial=)`, with any further keyword that `tqdm.tqdm` takes."""

silent: Bars = functools.partial(tqdm.tqdm, disable=True)
"""Makes a progress bar that shows nothing."""


def available_cores() -> int:
    """Returns the number of cores that this process may use, which Slurm, taskset and containers limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def quiet() -> Iterator[None]:
    """Hides what is logged, up to warnings, and leaves what the caller has disabled as it was."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
