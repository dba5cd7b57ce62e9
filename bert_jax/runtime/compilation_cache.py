"""Compiled programs that the runs of a search share: they differ in seeds and learning rates, which are arguments."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

FOLDER = "programs"


@contextmanager
def shared_programs(folder: epath.Path) -> Iterator[None]:
    """Keeps in `folder` what is compiled from here on, and takes from there what has been compiled before.

    Nothing where JAX has such a folder already, as by JAX_COMPILATION_CACHE_DIR.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        yield
        return
    jax.config.update("jax_compilation_cache_dir", str(folder / FOLDER))
    compilation_cache.reset_cache()  # JAX looks for it once
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
