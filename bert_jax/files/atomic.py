"""Atomic writes and copies of files and folders, on a local disk or in an object store; see `remote.py`.

A file or folder is written beside its target, as .NAME.partial-XXXX, and renamed when it is complete. The next write of
it deletes what a killed process left. A store creates an object with the last byte of its upload.

A JSON file that this package writes has a `format_version`; a newer one is refused with the way out.
"""

import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from etils import epath

from bert_jax.errors import InputError
from bert_jax.files.remote import exists, is_remote, is_taken, parse_path, store_errors, store_of
from bert_jax.files.text_files import COMPRESSED, is_special


def make_folder(folder: epath.Path) -> None:
    """Creates a local folder with its parents, and checks with a file that a local or remote one can be written.

    A local file has no name, so that none is left by a killed process. Object stores have no folders, and some clients
    would create a bucket whose name is a typo.
    """
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with store_errors(folder), tempfile.TemporaryFile(dir=folder):
            return
    probe = folder / f".write-check-{os.urandom(4).hex()}"
    write_whole(probe, b"")
    with store_errors(probe):
        probe.unlink()


def check_file_output(output: str, *, is_new: bool = False) -> None:
    """Creates the folder of an output file and checks that it is writable. Raises InputError or OSError if not.

    A file that exists will be replaced; with `is_new` it is refused.
    """
    path = parse_path(output)
    if output == "-" or not path.name or output.endswith("/") or path.is_dir() or path.suffix.lower() in COMPRESSED:
        raise InputError(f"output={output}: expected a file, not compressed; name one, or /dev/stdout for stdout")
    if not _is_stream(output):
        if is_new and exists(path):
            raise InputError(f"output={output}: already exists; choose another name or delete it")
        make_folder(path.parent)


def _is_stream(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a pipe or a device, such as /dev/stdout, also where that is redirected to a file."""
    return os.fspath(path).startswith(("/dev/std", "/dev/fd/")) or is_special(path)


@contextmanager
def whole_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager for an atomic write: yields a local path whose file becomes `path` at the end of the block.

    After an error, `path` is unchanged. Several processes may write it: each holds a lock on its file, and those of
    killed processes, which have none, are deleted. A remote file is uploaded from the local disk. Raises as
    `store_errors` does.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory(prefix="bert-jax-") as folder:
            local = Path(folder) / "file"
            yield local
            store, name = store_of(path)
            with open(local, "rb") as file, store_errors(path), store.open(name, "wb") as uploaded:
                shutil.copyfileobj(file, uploaded, 1 << 20)
        return
    final = Path(os.path.realpath(path))  # a symbolic link is kept
    for left in final.parent.glob(f".{glob.escape(final.name)}.partial-*"):
        with suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    partial = final.with_name(f".{final.name}.partial-{os.urandom(4).hex()}")
    try:
        with store_errors(path), ExitStack() as locks:
            while not partial.exists():  # again where another process deleted it before the lock
                held = locks.enter_context(open(partial, "xb"))
                with suppress(OSError):  # a file system without locks, where nothing is deleted either
                    fcntl.flock(held, fcntl.LOCK_EX)
            yield partial
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, final)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a file that becomes `path`, as `whole_path`. Pipes and devices are appended to directly."""
    if _is_stream(path):
        # A file opened again would have an offset of its own, and what is printed would overwrite its rows.
        with store_errors(path), open(os.dup(1) if os.fspath(path) == "/dev/stdout" else path, "ab") as device:
            yield device
        return
    with whole_path(path) as partial, open(partial, "wb") as file:
        yield file


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file atomically. Raises as `store_errors` does."""
    with whole_file(path) as file:
        file.write(content)


def read_whole(path: epath.Path) -> bytes:
    """Reads a small file. Raises as `store_errors` does."""
    store, name = store_of(path)
    with store_errors(path):
        content: bytes = store.cat_file(name) if is_remote(path) else path.read_bytes()
    return content


def new_folder(output: str) -> epath.Path:
    """Returns the path of an output folder. Raises InputError unless it does not exist or is empty.

    The working folder and a mount point are refused, because another folder replaces the output when it is complete.
    """
    folder = parse_path(output)
    if is_taken(folder):
        raise InputError(f"output={output!r}: already exists and is not empty; expected a new or empty folder")
    final = os.path.realpath(output)
    if not is_remote(folder) and (final == os.path.realpath(os.curdir) or os.path.ismount(final)):
        raise InputError(f"output={output}: the working folder or a mount point cannot be replaced; use {output}/data")
    return folder


@contextmanager
def whole_folder(folder: epath.Path, last: str) -> Iterator[epath.Path]:
    """Context manager that yields a new local folder and publishes it as `folder`; deletes it after an error.

    For a local `folder`, which must not exist or must be empty, it lies beside it and is renamed. Such folders that
    earlier, killed processes left are deleted. For a remote one, it is a temporary folder, and its files are uploaded,
    `last` at the end: if `last` exists, the folder is complete.

    Raises InputError for a folder that another process filled meanwhile.
    """
    if is_remote(folder):
        with tempfile.TemporaryDirectory(prefix="bert-jax-") as local:
            make_folder(folder)
            yield epath.Path(local)
            store, target = store_of(folder)
            names = [path.name for path in Path(local).iterdir() if path.name != last]
            for group in (names, [last]):
                with store_errors(folder):
                    store.put([f"{local}/{name}" for name in group], [f"{target}/{name}" for name in group])
        return
    final = Path(os.path.realpath(folder))  # a symbolic link is kept
    for left in final.parent.glob(f".{glob.escape(final.name)}.partial-*"):
        shutil.rmtree(left, ignore_errors=True)
    # A name of its own: a process that writes the same output fails when its folder is deleted, and never mixes files.
    partial = final.with_name(f".{final.name}.partial-{os.urandom(4).hex()}")
    partial.mkdir(parents=True)
    try:
        yield epath.Path(partial)
        os.rename(partial, final)  # replaces an empty folder, which epath does not
    except OSError as error:
        if not is_taken(folder):
            raise
        raise InputError(f"output={folder}: another process wrote it meanwhile; choose another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# --- JSON ------------------------------------------------------------------------------------------------------------


def check_version(path: str | os.PathLike[str], content: Mapping[str, Any], newest: int) -> None:
    """Raises InputError if `format_version` of a file is newer than `newest`; a file without it has version 1."""
    if not isinstance(content, Mapping):
        raise InputError(f"{os.fspath(path)}: expected a JSON object, got {type(content).__name__}")
    version = content.get("format_version", 1)
    if type(version) is not int or not 1 <= version <= newest:
        name = f"{os.fspath(path)}: format_version={version!r:.40}"
        raise InputError(f"{name}: expected at most {newest}; install the version of bert_jax that wrote it")


def read_json(path: epath.Path, newest: int = 1) -> dict[str, Any]:
    """Reads a JSON object. Raises InputError for one that is damaged or of a newer version."""
    try:
        content: dict[str, Any] = json.loads(read_whole(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged: no JSON ({error!s:.200}); write it again") from error
    check_version(path, content, newest)
    return content


def write_json(path: epath.Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object atomically."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())
