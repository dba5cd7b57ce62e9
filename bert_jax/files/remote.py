"""Paths on a disk and in object stores (`gs://`, `s3://`, `az://`, `hf://`).

The library of each store retries broken connections, 429 and 5xx. Errors that it still raises, or that no retry would
change, are raised with the path.
"""

import importlib.util
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from etils import epath

from bert_jax.errors import BertJaxError, InputError, exit_status

_PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}  # scheme: the package that opens it
_DENIED = re.compile("forbidden|anonymous|credential|unauthorized", re.IGNORECASE)  # in untyped errors of stores
# Cached listings hide later writes of other processes; gcsfs and s3fs never expire theirs. Disabled globally because
# epath and Orbax open file systems of their own.
for _protocol in ("gcs", "s3", "abfs"):
    fsspec.config.conf.setdefault(_protocol, {}).setdefault("use_listings_cache", False)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns True for the path of an object store, False for a local one."""
    return "://" in os.fspath(path)


def parse_path(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the path that a user has given; a local path is returned unchanged, relative or not.

    Raises InputError for a path that is empty or not UTF-8, an unknown scheme, a missing package that opens the scheme,
    or a missing bucket name.
    """
    name = os.fspath(path)
    if not name:
        raise InputError("the path is empty; expected a file or folder")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{os.fsencode(name)!a}: the path is not UTF-8; rename the file or folder") from error
    if is_remote(name):
        scheme, _, rest = name.partition("://")
        if scheme not in _PACKAGES:
            known = ", ".join(f"{known}://" for known in _PACKAGES)
            raise InputError(f"{name}: unknown scheme {scheme}://; expected a local path or one of {known}")
        if importlib.util.find_spec(package := _PACKAGES[scheme]) is None:
            raise InputError(f"{name}: {package} is not installed; run pip install {package}")
        if not rest.strip("/"):
            raise InputError(f"{name}: no bucket name; expected {scheme}://BUCKET/PATH")
    return epath.Path(name)


def absolute(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the path of `parse_path`, absolute if local. (`resolve` takes a remote path for a local folder.)"""
    parsed = parse_path(path)
    return parsed if is_remote(path) else parsed.resolve()


def store_of(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """Returns the file system of a path, and the path within it."""
    store, name = fsspec.core.url_to_fs(os.fspath(path))
    return store, name


@contextmanager
def store_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the name of a file or folder to the errors of reading or writing it.

    Raises InputError if a store does not have it or denies access, and BertJaxError for any other error of a store.
    An OSError of a disk is raised as it is, with the file's name, which write(2) to a full disk does not give.
    """
    try:
        yield
    except BertJaxError:
        raise
    except Exception as error:
        if not is_remote(path):
            if isinstance(error, OSError) and error.errno and error.filename is None:
                error.filename = os.fspath(path)
            raise
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, (FileNotFoundError, ValueError, PermissionError)) or _DENIED.search(words):
            raise InputError(f"{os.fspath(path)}: cannot be used; check the name and credentials ({words})") from error
        raise BertJaxError(f"{os.fspath(path)}: the store failed ({words}); run the command again") from error


def exists(path: epath.Path) -> bool:
    """Returns True if the file or folder exists. Raises as `store_errors` does."""
    with store_errors(path):
        if is_remote(path):
            return bool(path.exists())
        try:
            os.stat(path)
        except (OSError, ValueError) as error:  # `Path.exists` takes all for absence, a stale NFS handle as well
            if isinstance(error, OSError) and exit_status(error) == 1:
                raise
            return False
        return True


def children(folder: epath.Path) -> list[epath.Path]:
    """Returns what is directly in a folder, sorted; [] without such a folder. Raises as `store_errors` does."""
    with store_errors(folder), suppress(FileNotFoundError, NotADirectoryError):
        if not is_remote(folder) or folder.is_dir():  # a store lists an object as its own content
            return sorted(folder.iterdir())
    return []


def is_taken(folder: epath.Path) -> bool:
    """Returns True for an existing file or a folder that is not empty. Raises as `store_errors` does."""
    with store_errors(folder):
        return exists(folder) and (not folder.is_dir() or any(folder.iterdir()))


def open_to_read(path: str) -> BinaryIO:
    """Opens a file, seekable, for reading bytes. Raises as `store_errors` does."""
    with store_errors(path):
        if not is_remote(path):
            return open(path, "rb", buffering=1 << 20)
        store, name = store_of(path)
        return io.BufferedReader(store.open(name, "rb"), 1 << 20)


def read_range(path: str, start: int, stop: int) -> bytes:
    """Reads the bytes [start, stop) of a file. Raises as `store_errors` does."""
    with store_errors(path):
        if is_remote(path):
            store, name = store_of(path)
            return bytes(store.cat_file(name, start, stop)) if stop > start else b""
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)


def cache_folder() -> Path:
    """Returns the user's cache folder: `$BERT_JAX_CACHE`, or `~/.cache/bert_jax`."""
    return Path(os.environ.get("BERT_JAX_CACHE") or Path("~/.cache/bert_jax").expanduser()).absolute()
