"""JAX's persistent compilation cache: a program that was compiled once is read by later runs.

Seeds and schedules are arguments of the programs, so that runs which differ in them alone share a program. Whoever can
write to the cache can make its readers run code: the user's own cache is private.
"""

import hashlib
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.files.user_cache import cache_folder, make_private

log = logging.getLogger(__name__)

FOLDER = "programs"
AUTO, NONE = "auto", "none"
_is_decided: ContextVar[bool] = ContextVar("is_decided", default=False)  # by a search or a study, for its runs
_SWITCHES = ("false", "true", "off", "on", "no", "yes", "0", "1", "none", "auto")


@contextmanager
def kept_programs(setting: str, workdir: epath.Path) -> Iterator[None]:
    """Reads compiled programs from a cache, and writes new ones to it.

    Does nothing if JAX has a cache already, from JAX_COMPILATION_CACHE_DIR, and for the runs of a search or study: its
    setting is theirs.

    Args:
      setting: `compilation_cache` of the config: "auto", "none" or a folder, which may be remote. "auto" is the user's
        cache folder, or a folder in the workdir if that is remote, because the hosts may be new ones.
      workdir: the run's folder.

    Raises:
      InputError: `setting` is not a folder, or cannot be created.
    """
    is_decided = _is_decided.get() or jax.config.values["jax_compilation_cache_dir"]
    folder = "" if is_decided else _folder(setting, workdir)
    token = _is_decided.set(True)
    if folder:
        log.info("Compiled programs are kept in %s", folder)
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()  # JAX reads the setting once
    try:
        yield
    finally:
        _is_decided.reset(token)
        if folder:
            jax.config.update("jax_compilation_cache_dir", None)
            compilation_cache.reset_cache()


def check_setting(setting: str) -> None:
    """Raises InputError for a `compilation_cache` such as "False" or "off", which would be a folder's name."""
    if setting not in (AUTO, NONE) and setting.lower() in _SWITCHES:
        raise _refusal(setting, "is not a folder's name")


def check_folder(setting: str) -> None:
    """Raises InputError if this machine cannot have the folder of a `compilation_cache`; creates nothing."""
    given = remote.absolute(setting)
    if setting in (AUTO, NONE) or remote.is_remote(given):
        return
    existing = next(path for path in (given, *given.parents) if path.exists())
    if not existing.is_dir():
        raise _refusal(setting, "is a file" if existing == given else f"{existing} is a file")
    if not os.access(existing, os.W_OK):
        raise _refusal(setting, f"{existing} may not be written to")


def _refusal(setting: str, problem: str) -> InputError:
    return InputError(f"compilation_cache={setting}: {problem}; expected {AUTO}, {NONE} or a folder")


def _folder(setting: str, workdir: epath.Path) -> str:
    """Returns the cache's folder, or an empty string for none."""
    if setting == NONE:
        return ""
    if setting != AUTO:
        check_folder(setting)
        given = remote.absolute(setting)
        if not remote.is_remote(given):
            try:
                given.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _refusal(setting, f"cannot be created ({error.strerror})") from error
        return str(given)
    if remote.is_remote(workdir):
        return str(workdir / FOLDER)
    folder = cache_folder() / FOLDER / cpu_kind()
    try:
        problem = make_private(folder)
    except OSError as error:
        problem = str(error)
    if problem:
        log.warning("%s: compiled programs are not kept there: %s; set compilation_cache to a folder", folder, problem)
        return ""
    return str(folder)


def cpu_kind() -> str:
    """Returns a name of the CPU's kind: another machine may lack the instructions of programs that it reads."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kind = sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    digest = hashlib.sha256("\n".join(kind).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:8]}"
