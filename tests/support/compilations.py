"""Programs that JAX compiles during a test, and the threads that compile them."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax

COMPILED = re.compile(r"Finished XLA compilation of jit\((\w+)\)")
"""Matches a line of JAX's log, with the name of the program."""


@contextmanager
def logged_compilations() -> Iterator[list[tuple[str, str]]]:
    """Yields a list that each compilation is added to: the name of the program, and that of the thread."""
    found: list[tuple[str, str]] = []

    class Names(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.extend((name, record.threadName or "") for name in COMPILED.findall(record.getMessage()))

    handler, before = Names(), jax.config.values["jax_log_compiles"]
    logging.getLogger("jax").addHandler(handler)
    jax.config.update("jax_log_compiles", True)
    try:
        yield found
    finally:
        jax.config.update("jax_log_compiles", before)
        logging.getLogger("jax").removeHandler(handler)
