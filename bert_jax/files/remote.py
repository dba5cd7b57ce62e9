"""Files that are not on this machine: whatever `etils.epath` opens (gs://, s3://, az://, hf://), through fsspec.

An object store differs from a disk in what a writer may count on. Nothing is appended to, nothing is renamed in one go,
and a folder is but a prefix of names; yet an object that is put whole is there whole or not at all, a promise that
`atomic.py` gives for both.

Transient errors are tried again. The store's own library does so for each request, for half a minute (gcsfs: six times)
or many times over (TensorStore, which reads and writes the arrays of checkpoints: 32 times). What it gives up on, or
does not know, such as a download that ends early, `patiently` tries again for some minutes. What no second try would
mend is an InputError at once.
"""

import errno
import importlib.util
import io
import itertools
import logging
import os
import random
import socket
import time
from collections.abc import Callable
from glob import has_magic
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote

import fsspec
import fsspec.config
from etils import epath

from bert_jax.errors import BertJaxError, InputError

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_SECONDS = 300.0
"""How long something is tried again before it has failed. An outage of minutes should not cost a run of days."""
LEAST_TRIES = 3
"""However long each of them takes."""
DAMAGED_TRIES = 3
"""Of a file that arrives damaged: what is damaged where it is from will not get better."""
LONGEST_WAIT_SECONDS = 30.0
"""Between two tries."""
SILENCE_SECONDS = 60.0
"""After which a connection to Google Cloud Storage on which nothing comes is given up, and the request tried again."""

_PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}  # by scheme: who opens it
_INSTALL = {"gs": "pip install 'bert-jax[gcs]'"}
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_TRANSIENT_ERRNO = {
    errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE, errno.ETIMEDOUT, errno.EHOSTUNREACH,
    errno.ENETUNREACH, errno.ENETDOWN, errno.EBUSY, errno.EAGAIN,
}  # fmt: skip
# A listing that is remembered hides what another process has written since: gcsfs and s3fs keep theirs for ever. Said
# here, and not to a file system that we open, for epath and Orbax open their own.
for _protocol in ("gcs", "s3", "abfs"):
    fsspec.config.conf.setdefault(_protocol, {}).setdefault("use_listings_cache", False)

# By name, because the libraries are not imported here. What is in none of these sets is a mistake in code, and raised.
_NETWORK_LIBRARIES = {"aiohttp", "requests", "urllib3", "botocore", "azure", "google", "gcsfs"}
_TRANSIENT_KINDS = {
    "ClientConnectionError", "ClientPayloadError",  # aiohttp
    "ConnectionError", "Timeout", "ChunkedEncodingError", "ContentDecodingError",  # requests, and botocore's first
    "ProtocolError", "TimeoutError", "MaxRetryError", "PoolError",  # urllib3
    "HTTPClientError", "IncompleteReadError", "ResponseStreamingError", "CredentialRetrievalError",
    "MetadataRetrievalError",  # botocore
    "ServiceRequestError", "ServiceResponseError",  # azure
    "ChecksumError", "TransportError", "RefreshError",  # gcsfs, google.auth
}  # fmt: skip
_NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "UnknownCredentialError", "ConfigParseError",
    "ConfigNotFound",  # botocore
    "ClientAuthenticationError",  # azure
    "DefaultCredentialsError", "MalformedError", "ReauthFailError", "UserAccessTokenError", "ClientCertError",  # google
}  # fmt: skip
_BAD_ADDRESS = {
    "InvalidURL", "MissingSchema", "InvalidSchema", "InvalidProxyURL", "LocationValueError",  # those three
    "ParamValidationError", "ValidationError", "BaseEndpointResolverError", "InvalidDNSNameError",
    "UnsupportedS3ArnError", "EndpointProviderError",  # botocore
    "ClientConnectorCertificateError", "SSLCertVerificationError",
}  # fmt: skip


class IncompleteError(OSError):
    """A file that did not arrive whole."""


# --- Paths -----------------------------------------------------------------------------------------------------------


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is of a store and not of this machine's disks."""
    return "://" in os.fspath(path)


def named(path: str | os.PathLike[str]) -> epath.Path:
    """The path that a user has named.

    Raises InputError for a scheme that is not known, without the package that opens it, and where no bucket is named.
    A local path stays as it is, relative or not.
    """
    name = os.fspath(path)
    if not is_remote(name):
        return epath.Path(name)
    scheme, _, rest = name.partition("://")
    if scheme not in _PACKAGES:
        known = ", ".join(f"{known}://" for known in _PACKAGES)
        raise InputError(f"{name}: {scheme}:// is not known: a path is local or begins with {known}")
    package = _PACKAGES[scheme]
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{name}: {package} is needed to open it: {_INSTALL.get(scheme, f'pip install {package}')}")
    if not rest.strip("/"):
        raise InputError(f"{name} names no bucket")
    _limit_silence()
    return epath.Path(name)


def absolute(path: str | os.PathLike[str]) -> epath.Path:
    """As `named`; a local path is made absolute. (`resolve` takes a remote one for a folder of this machine.)"""
    return named(path) if is_remote(path) else epath.Path(path).resolve()


# --- Trying again ----------------------------------------------------------------------------------------------------


_answered: set[str] = set()
"""Buckets whose host has answered: if it is unknown later, the network is at fault and not the name."""


def patiently(path: str | os.PathLike[str], function: Callable[[], T]) -> T:
    """What `function` returns, tried again for `PATIENCE_SECONDS` where it fails for a reason that may pass.

    Args:
      path: what it reads or writes, for messages. A local one is tried once, and its errors are left as they are.
      function: may be called several times.

    Raises:
      InputError: it is not there, or may not be read or written; at once.
      BertJaxError: it went on failing.
    """
    if not is_remote(path):
        return function()
    began = time.monotonic()
    bucket = "/".join(os.fspath(path).split("/", 3)[:3])
    for attempt in itertools.count():
        try:
            result = function()
            _answered.add(bucket)
            return result
        except BertJaxError:
            raise
        except Exception as error:
            reason = permanent_reason(error)
            if reason is None and bucket not in _answered and _is_unknown_host(error):
                reason = "the store's host is unknown: check region, account and endpoint"
            if reason is not None:
                raise InputError(f"{os.fspath(path)}: {reason} ({said(error)})") from error
            if not is_transient(error):
                raise
            wait = min(2.0**attempt, LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1.0)
            spent = time.monotonic() - began
            is_damaged = isinstance(error, IncompleteError) and attempt + 1 >= DAMAGED_TRIES
            if is_damaged or (spent + wait > PATIENCE_SECONDS and attempt + 1 >= LEAST_TRIES):
                raise BertJaxError(
                    f"{os.fspath(path)}: gave up after {attempt + 1} tries in {spent:.0f} s ({said(error)})"
                ) from error
            log.warning("%s: %s; trying again in %.1f s", os.fspath(path), said(error), wait)
            time.sleep(wait)
    raise AssertionError("unreachable")


def permanent_reason(error: BaseException) -> str | None:
    """What is wrong, where the store said that there is no such thing or that it may not be had; else None."""
    words = said(error)
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "no such file, folder or bucket"
    if isinstance(error, PermissionError) or status in (401, 403) or "Forbidden" in words:
        return "access is denied: check your credentials and what they may do"
    kinds = _kinds(error)
    if kinds & _NO_CREDENTIALS or ("RefreshError" in kinds and ("invalid_grant" in words or "eauthenticat" in words)):
        return "no valid credentials: log in to the store, or name a file of credentials"
    if kinds & _BAD_ADDRESS or status == 400 or words.startswith("ValueError: Bad Request"):
        return "the store cannot be asked for such a name: check bucket, region and endpoint"
    return None


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(error, (IncompleteError, TimeoutError, ConnectionError)):
        return True
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    return bool(_kinds(error) & _TRANSIENT_KINDS)


def _kinds(error: BaseException) -> set[str]:
    """Returns the names of an error's classes that are a network library's, or Python's own of certificates."""
    return {
        kind.__name__
        for kind in type(error).__mro__
        if kind.__module__.partition(".")[0] in {*_NETWORK_LIBRARIES, "ssl"}
    }


def _is_unknown_host(error: BaseException | None) -> bool:
    """Returns whether no such host is known. A resolver that does not answer is another error, which may pass."""
    while error is not None:
        inner = getattr(error, "os_error", None)  # of aiohttp
        if any(isinstance(one, socket.gaierror) and one.errno == socket.EAI_NONAME for one in (error, inner)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of aiohttp, gcsfs or the like carries."""
    for name in ("status", "code", "status_code"):
        value = getattr(error, name, None)
        if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
            return int(value)
    return None


def said(error: BaseException) -> str:
    """An error in one line."""
    words = unquote(" ".join(str(error).split()))[:300].strip(" ,")
    return words if isinstance(error, IncompleteError) else f"{type(error).__name__}: {words}" if words else repr(error)


class RetriesSaid(logging.Handler):
    """For the logger of gcsfs: what it tries again by itself is a warning of ours, and the rest is not shown.

    It says so below INFO, and what it gives up on with a traceback; the error itself is raised and said in one line.
    """

    @classmethod
    def attach(cls) -> None:
        """Takes over the loggers of gcsfs and fsspec."""
        library = logging.getLogger("gcsfs")
        library.handlers = [cls()]
        library.propagate = False
        library.setLevel(logging.DEBUG)
        logging.getLogger("fsspec").addHandler(logging.NullHandler())
        logging.getLogger("fsspec").propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Passes on what tells of another try."""
        message = record.getMessage()
        if "retrying after exception" in message:
            log.warning("Google Cloud Storage: %s; trying again", message.partition("exception: ")[2].strip(" ,"))


# --- Asking and reading ---------------------------------------------------------------------------------------------


def sizes(folder: epath.Path) -> dict[str, int]:
    """Bytes of each file right below a remote folder, by name, in one listing; nothing where there is no folder."""
    store, name = store_of(folder)

    def listed() -> list[dict[str, Any]]:
        try:
            return store.ls(name, detail=True)
        except FileNotFoundError:
            return []

    entries = patiently(folder, listed)
    return {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in entries if entry["type"] == "file"}


def is_taken(folder: epath.Path) -> bool:
    """Whether there is a file of that name, or a folder with something in it. Raises as `patiently` does."""
    return patiently(folder, lambda: folder.exists() and (not folder.is_dir() or any(folder.iterdir())))


def size(path: str | os.PathLike[str]) -> int:
    """Bytes of a remote file. Raises as `patiently` does."""
    store, name = store_of(path)
    return patiently(path, lambda: int(store.info(name)["size"]))


def exists(path: epath.Path) -> bool:
    """Whether there is such a file or folder. Raises as `patiently` does."""
    return patiently(path, path.exists)


def files(path: str) -> list[str]:
    """The remote files that a path, a folder or a pattern names, sorted; for a folder all below it.

    Files and folders whose names begin with a dot are left out of a folder, as in a shell's patterns. Raises as
    `patiently` does.
    """
    store, name = store_of(path)

    def is_shown(file: str, folder: str) -> bool:
        return not any(part.startswith(".") for part in file.removeprefix(folder).split("/"))

    def found() -> list[str]:
        if store.exists(name):  # first, because a real name may hold a pattern's characters
            return [file for file in store.find(name) if file == name or is_shown(file, name)]
        if not has_magic(name):
            return []
        below = {folder: store.find(folder) for folder in store.glob(name)}
        return [file for folder, files in below.items() for file in files if file == folder or is_shown(file, folder)]

    return sorted({store.unstrip_protocol(file) for file in patiently(path, found)})


def version(path: str) -> str:
    """Another string whenever a remote file has been written anew. Raises as `patiently` does."""
    store, name = store_of(path)
    return patiently(path, lambda: str(store.ukey(name)))


def open_to_read(path: str) -> BinaryIO:
    """A remote file, to be read and sought in, that goes on where a connection has broken. Raises as `patiently`."""
    return io.BufferedReader(_PatientFile(path), 1 << 20)


class _PatientFile(io.RawIOBase):
    def __init__(self, path: str):
        store, name = store_of(path)
        self._path = path
        self._file: Any = patiently(path, lambda: store.open(name, "rb"))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        at = self._file.tell()

        def read() -> bytes:
            self._file.seek(at)
            return self._file.read(len(buffer))

        block = patiently(self._path, read)
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _limit_silence() -> None:
    """Without it, a request to Google may take five minutes, a slow upload's included, and then fails for good."""
    if importlib.util.find_spec("aiohttp") is not None:
        import aiohttp

        silence = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
        fsspec.config.conf.setdefault("gcs", {}).setdefault("requests_timeout", silence)


def store_of(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """The file system of a remote path, and the path as it knows it."""
    _limit_silence()
    return fsspec.core.url_to_fs(os.fspath(path))
