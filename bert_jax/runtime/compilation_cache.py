"""Compilation cache that the runs of a search share: seeds and learning rates are arguments of the programs."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

FOLDER = "programs"


@contextmanager
def shared_programs(folder: epath.Path) -> Iterator[None]:
    """Writes compiled programs to a cache in `folder` and reads them from it.

    Does nothing if JAX has a cache folder already, such as from JAX_COMPILATION_CACHE_DIR.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        yield
        return
    jax.config.update("jax_compilation_cache_dir", str(folder / FOLDER))
    compilation_cache.reset_cache()  # JAX reads the setting once
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
