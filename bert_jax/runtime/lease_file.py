"""Lock file that exactly one of several contenders creates or takes over, on a disk or in Google Cloud Storage.

Guarantees under concurrent access:

- `create` succeeds for one contender: O_EXCL on a disk (NFS version 3 or later included), generation 0 in the store.
- `take_over` succeeds for one contender, and only if the file has not changed since that one read it.
- `renew` and `release` never change the file of another holder.

The store checks generations itself. On a disk `take_over` renames the file first, compares it with the one that was
read, and puts it back if it differs. This takes a holder that was silent for long and renews at that moment. A third
contender may then create the file; the holder detects that in its next `renew`.
"""

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from etils import epath

from bert_jax.files import remote


@dataclass(frozen=True)
class Found:
    """Content that was read, and its generation in a store."""

    content: bytes
    generation: str = ""


class LeaseFile(Protocol):
    """Interface of a lock file. Methods that write raise FileExistsError if another holder has the file."""

    def read(self) -> Found | None:
        """Reads the file; None if it does not exist."""

    def create(self, content: bytes) -> None:
        """Creates the file, which must not exist."""

    def take_over(self, found: Found, content: bytes) -> None:
        """Replaces the file if it is unchanged since it was `found`."""

    def renew(self, is_mine: Callable[[Found], bool], content: bytes) -> None:
        """Replaces the content if the caller holds the file; recreates a deleted file."""

    def release(self, is_mine: Callable[[Found], bool]) -> None:
        """Deletes the file if the caller holds it."""


def open_lease_file(path: epath.Path) -> LeaseFile:
    """Returns the lock file at a path, which does not have to exist."""
    return _ObjectInStore(path) if remote.is_remote(path) else _FileOnDisk(Path(os.fspath(path)))


class _FileOnDisk:
    def __init__(self, path: Path):
        self._path = path

    def read(self) -> Found | None:
        try:
            return Found(self._path.read_bytes())
        except FileNotFoundError:
            return None

    def create(self, content: bytes) -> None:
        file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            _write(file, content)
        except BaseException:  # such as a full disk
            self._path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def take_over(self, found: Found, content: bytes) -> None:
        aside = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            raise FileExistsError(f"{self._path} was deleted or changed hands") from None
        if aside.read_bytes() != found.content:
            self._put_back(aside)
            raise FileExistsError(f"{self._path} has changed hands")
        aside.unlink()
        self.create(content)

    def _put_back(self, aside: Path) -> None:
        try:
            os.link(aside, self._path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.rename(aside, self._path)
        aside.unlink(missing_ok=True)

    def renew(self, is_mine: Callable[[Found], bool], content: bytes) -> None:
        try:
            file = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            self.create(content)
            return
        try:
            if not is_mine(Found(os.pread(file, 1 << 20, 0))):
                raise FileExistsError(f"{self._path} has changed hands")
            _write(file, content)  # in place: if the path now names another file, nobody reads this one
            ours, there = os.fstat(file), os.stat(self._path)
            if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
                raise FileExistsError(f"{self._path} has changed hands")
        finally:
            os.close(file)

    def release(self, is_mine: Callable[[Found], bool]) -> None:
        if (found := self.read()) is not None and is_mine(found):
            self._path.unlink(missing_ok=True)


def _write(file: int, content: bytes) -> None:
    os.pwrite(file, content, 0)
    os.ftruncate(file, len(content))
    os.fsync(file)


class _ObjectInStore:
    """Lock file in a store. Each write names the generation to replace, 0 for none; the store refuses a stale one."""

    def __init__(self, path: epath.Path):
        self._path = path
        self._store, name = remote.store_of(path)
        self._bucket, self._key, _ = self._store.split_path(name)

    def read(self) -> Found | None:
        def read() -> Found | None:
            try:
                headers, content = self._call("GET", "b/{}/o/{}", self._bucket, self._key, alt="media")
            except FileNotFoundError:
                return None
            return Found(content, headers["X-Goog-Generation"])

        return remote.retry_transient(self._path, read)

    def create(self, content: bytes) -> None:
        self._put(content, "0")

    def take_over(self, found: Found, content: bytes) -> None:
        self._put(content, found.generation)

    def renew(self, is_mine: Callable[[Found], bool], content: bytes) -> None:
        found = self.read()
        if found is not None and not is_mine(found):
            raise FileExistsError(f"{self._path} has changed hands")
        self._put(content, "0" if found is None else found.generation)

    def release(self, is_mine: Callable[[Found], bool]) -> None:
        if (found := self.read()) is None or not is_mine(found):
            return

        def delete() -> None:
            with suppress(FileNotFoundError, FileExistsError):
                self._call("DELETE", "b/{}/o/{}", self._bucket, self._key, ifGenerationMatch=found.generation)

        remote.retry_transient(self._path, delete)

    def _put(self, content: bytes, generation: str) -> None:
        url = self._store.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"

        def put() -> None:
            try:
                self._call(
                    "POST", url, self._bucket, uploadType="media", name=self._key, ifGenerationMatch=generation,
                    data=content,
                )  # fmt: skip
            except FileExistsError:
                found = self.read()
                if found is None or found.content != content:  # otherwise the answer was lost and the request retried
                    raise

        remote.retry_transient(self._path, put)

    def _call(self, *arguments: Any, **options: Any) -> Any:
        return self._store.call(*arguments, **options)
