"""JAX's persistent compilation cache: a program that was compiled once is read by later runs.

Seeds and schedules are arguments of the programs, so that runs which differ in them alone share a program. JAX keeps
programs of different accelerators and CPUs apart. Whoever can write to the cache can make its readers run code: the
user's own cache is private.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from bert_jax.errors import InputError
from bert_jax.files import remote

log = logging.getLogger(__name__)

FOLDER = "programs"
AUTO, NONE = "auto", "none"


@contextmanager
def kept_programs(setting: str, workdir: epath.Path) -> Iterator[None]:
    """Reads compiled programs from a cache, and writes new ones to it.

    Does nothing if JAX has a cache already, from JAX_COMPILATION_CACHE_DIR, or if its cache is off, and for the runs of
    a search or study: its setting is theirs.

    Args:
      setting: `compilation_cache` of the config: "auto", "none" or a folder, which may be remote. "auto" is the user's
        cache folder, or a folder in the workdir if that is remote, because the hosts may be new ones.
      workdir: the run's folder.

    Raises:
      InputError: `setting` is not a folder, or cannot be created.
    """
    if jax.config.values["jax_compilation_cache_dir"] or not jax.config.values["jax_enable_compilation_cache"]:
        yield
        return
    folder = _folder(setting, workdir)
    log.info("Compiled programs are kept in %s", folder)
    try:
        _use(folder, is_on=bool(folder))
        yield
    finally:
        _use(None, is_on=True)


def _use(folder: str | None, *, is_on: bool) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_enable_compilation_cache", is_on)
    compilation_cache.reset_cache()  # JAX reads the settings once


def _folder(setting: str, workdir: epath.Path) -> str | None:
    """Returns the cache's folder, which exists if it is local, or None."""
    if setting == NONE:
        return None
    own = epath.Path(remote.cache_folder()) / FOLDER
    folder = remote.absolute(setting) if setting != AUTO else workdir / FOLDER if remote.is_remote(workdir) else own
    try:
        if not remote.is_remote(folder):
            os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        if setting != AUTO:
            raise InputError(f"compilation_cache={setting}: cannot be a folder ({error.strerror})") from error
        log.warning("%s: compiled programs are not kept there (%s); set compilation_cache", folder, error.strerror)
        return None
    return str(folder)
