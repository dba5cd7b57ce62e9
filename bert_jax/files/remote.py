"""Remote files: paths that `etils.epath` opens through fsspec (gs://, s3://, az://, hf://), with retries.

Object stores support neither appending nor atomic renames, and a folder is only a name prefix. Uploading an object is
atomic; `atomic.py` gives that guarantee for local files, too.

Transient errors are retried. The store's own library retries each request, for half a minute (gcsfs: six times) or
many times (TensorStore, which reads and writes the arrays of checkpoints: 32 times). `retry_transient` retries for some
minutes the errors that the library gives up on or does not detect, such as a download that ends early. A permanent
error is raised at once, as an InputError.
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
from bert_jax.extras import install_hint

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_SECONDS = 300.0
"""Time limit of all retries of an operation. An outage of minutes should not end a run of days."""
LEAST_TRIES = 3
"""Minimum number of attempts, however long each takes."""
DAMAGED_TRIES = 3
"""Maximum number of attempts for a corrupt file: if the source is corrupt, retries do not help."""
LONGEST_WAIT_SECONDS = 30.0
"""Maximum backoff between two attempts."""
SILENCE_SECONDS = 60.0
"""Timeout of a silent connection to Google Cloud Storage, after which the request is retried."""

_PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}  # scheme: the package that opens it
_EXTRAS = {"gs": "gcs", "hf": "hf"}  # scheme: the extra of this package with what opens it
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_TRANSIENT_ERRNO = {
    errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE, errno.ETIMEDOUT, errno.EHOSTUNREACH,
    errno.ENETUNREACH, errno.ENETDOWN, errno.EBUSY, errno.EAGAIN,
}  # fmt: skip
# Cached listings hide later writes of other processes; gcsfs and s3fs never expire theirs. Disabled globally because
# epath and Orbax open file systems of their own.
for _protocol in ("gcs", "s3", "abfs"):
    fsspec.config.conf.setdefault(_protocol, {}).setdefault("use_listings_cache", False)

# Error classes by name, since the libraries are not imported. Any other error is a bug and is re-raised.
_NETWORK_LIBRARIES = {
    "aiohttp", "requests", "urllib3", "botocore", "azure", "google", "gcsfs", "httpx", "httpx2", "huggingface_hub",
}  # fmt: skip
_TRANSIENT_KINDS = {
    "ClientConnectionError", "ClientPayloadError",  # aiohttp
    "ConnectionError", "Timeout", "ChunkedEncodingError", "ContentDecodingError",  # requests, and botocore's first
    "ProtocolError", "TimeoutError", "MaxRetryError", "PoolError",  # urllib3
    "HTTPClientError", "IncompleteReadError", "ResponseStreamingError", "CredentialRetrievalError",
    "MetadataRetrievalError",  # botocore
    "ServiceRequestError", "ServiceResponseError",  # azure
    "ChecksumError", "TransportError", "RefreshError",  # gcsfs, google.auth; httpx has a TransportError, too
}  # fmt: skip
_NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "UnknownCredentialError", "ConfigParseError",
    "ConfigNotFound",  # botocore
    "ClientAuthenticationError",  # azure
    "DefaultCredentialsError", "MalformedError", "ReauthFailError", "UserAccessTokenError", "ClientCertError",  # google
}  # fmt: skip
_BAD_ADDRESS = {
    "InvalidURL", "MissingSchema", "InvalidSchema", "InvalidProxyURL", "LocationValueError",  # the first three
    "ParamValidationError", "ValidationError", "BaseEndpointResolverError", "InvalidDNSNameError",
    "UnsupportedS3ArnError", "EndpointProviderError",  # botocore
    "ClientConnectorCertificateError", "SSLCertVerificationError",
    "HfUriError", "HFValidationError",  # huggingface_hub
}  # fmt: skip


class IncompleteError(OSError):
    """Incomplete or corrupt transfer of a file."""


# --- Paths -----------------------------------------------------------------------------------------------------------


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns True for the path of an object store, False for a local one."""
    return "://" in os.fspath(path)


def parse_path(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the path that a user has given; a local path is returned unchanged, relative or not.

    Raises InputError for an unknown scheme, a missing package that opens the scheme, or a missing bucket name.
    """
    name = os.fspath(path)
    if not is_remote(name):
        return epath.Path(name)
    scheme, _, rest = name.partition("://")
    if scheme not in _PACKAGES:
        known = ", ".join(f"{known}://" for known in _PACKAGES)
        raise InputError(f"{name}: unknown scheme {scheme}://; expected a local path or one of {known}")
    package = _PACKAGES[scheme]
    if importlib.util.find_spec(package) is None:
        install = install_hint(_EXTRAS[scheme]) if scheme in _EXTRAS else f"pip install {package}"
        raise InputError(f"{name}: {package} is not installed; run {install}")
    if not rest.strip("/"):
        raise InputError(f"{name}: no bucket name; expected {_example(name)}")
    _limit_silence()
    return epath.Path(name)


def _example(path: str) -> str:
    scheme = path.partition("://")[0]
    return "hf://datasets/OWNER/NAME/PATH" if scheme == "hf" else f"{scheme}://BUCKET/PATH"


def absolute(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the path of `parse_path`, absolute if local. (`resolve` takes a remote path for a local folder.)"""
    return parse_path(path) if is_remote(path) else epath.Path(path).resolve()


# --- Retries ---------------------------------------------------------------------------------------------------------


_answered: set[str] = set()
"""Buckets whose host has answered: a later unknown host is a network failure, not a wrong name."""


def retry_transient(path: str | os.PathLike[str], function: Callable[[], T]) -> T:
    """Calls `function`, retrying transient errors with exponential backoff for up to `PATIENCE_SECONDS`.

    Args:
      path: the file or folder that is read or written, for messages. For a local path, `function` is called once and
        its errors are not converted.
      function: must be safe to call several times.

    Raises:
      InputError: the path was not found or access was denied; raised at once.
      BertJaxError: all attempts failed.
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
                reason = "unknown host; check the network, region, account and endpoint"
            if reason is not None:
                raise InputError(f"{os.fspath(path)}: {reason} ({describe_error(error)})") from error
            if not is_transient(error):
                raise
            wait = min(2.0**attempt, LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1.0)
            spent = time.monotonic() - began
            is_damaged = isinstance(error, IncompleteError) and attempt + 1 >= DAMAGED_TRIES
            if is_damaged or (spent + wait > PATIENCE_SECONDS and attempt + 1 >= LEAST_TRIES):
                raise BertJaxError(
                    f"{os.fspath(path)}: failed {attempt + 1} attempts in {spent:.0f} s ({describe_error(error)})"
                ) from error
            log.warning("Transient error of %s: %s; retrying in %.1f s", os.fspath(path), describe_error(error), wait)
            time.sleep(wait)
    raise AssertionError("unreachable")


def permanent_reason(error: BaseException) -> str | None:
    """Describes a permanent error, such as a missing file or denied access (404, 401, 403); None for other errors."""
    words = describe_error(error)
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "not found: no such file, folder or bucket"
    if isinstance(error, PermissionError) or status in (401, 403) or "Forbidden" in words:
        return "access denied; check your credentials and their permissions"
    kinds = _kinds(error)
    if "OfflineModeIsEnabled" in kinds:
        return "no network is used; unset HF_HUB_OFFLINE"
    if kinds & _NO_CREDENTIALS or ("RefreshError" in kinds and ("invalid_grant" in words or "eauthenticat" in words)):
        return "no valid credentials; log in to the store or set a credentials file"
    if kinds & _BAD_ADDRESS or status == 400 or words.startswith("ValueError: Bad Request"):
        return "invalid name or address; check bucket, region and endpoint"
    return None


def is_transient(error: BaseException) -> bool:
    """Returns True for a transient error, after which a retry may succeed."""
    if isinstance(error, (IncompleteError, TimeoutError, ConnectionError)):
        return True
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    return bool(_kinds(error) & _TRANSIENT_KINDS)


def _kinds(error: BaseException) -> set[str]:
    """Returns the names of an error's base classes that belong to a network library or to Python's `ssl`."""
    return {
        kind.__name__
        for kind in type(error).__mro__
        if kind.__module__.partition(".")[0] in {*_NETWORK_LIBRARIES, "ssl"}
    }


def _is_unknown_host(error: BaseException | None) -> bool:
    """Returns True for an unknown host. A resolver that does not answer is another, transient error."""
    while error is not None:
        inner = getattr(error, "os_error", None)  # set by aiohttp
        if any(isinstance(one, socket.gaierror) and one.errno == socket.EAI_NONAME for one in (error, inner)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status that an error of aiohttp, gcsfs or a similar library, or its response, has; or None."""
    for source in (error, getattr(error, "response", None)):
        for name in ("status", "code", "status_code"):
            value = getattr(source, name, None)
            if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
                return int(value)
    return None


def describe_error(error: BaseException) -> str:
    """Formats an error as one line."""
    words = unquote(" ".join(str(error).split()))[:300].strip(" ,")
    return words if isinstance(error, IncompleteError) else f"{type(error).__name__}: {words}" if words else repr(error)


class RetryWarnings(logging.Handler):
    """Logging handler of gcsfs: turns its retry messages into warnings and drops all others.

    gcsfs logs retries below INFO, and an error that it gives up on with a traceback. That error is raised, too, and
    reported in one line.
    """

    @classmethod
    def attach(cls) -> None:
        """Replaces the handlers of the loggers of gcsfs and fsspec."""
        library = logging.getLogger("gcsfs")
        library.handlers = [cls()]
        library.propagate = False
        library.setLevel(logging.DEBUG)
        logging.getLogger("fsspec").addHandler(logging.NullHandler())
        logging.getLogger("fsspec").propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Logs a retry message of gcsfs as a warning."""
        message = record.getMessage()
        if "retrying after exception" in message:
            log.warning(
                "Transient error of Google Cloud Storage: %s; retrying", message.partition("exception: ")[2].strip(" ,")
            )


# --- Queries and reads -----------------------------------------------------------------------------------------------


def sizes(folder: epath.Path) -> dict[str, int]:
    """Lists the files directly in a remote folder with their bytes, in one request; empty for a missing folder."""
    store, name = store_of(folder)

    def list_folder() -> list[dict[str, Any]]:
        try:
            return store.ls(name, detail=True)
        except FileNotFoundError:
            return []

    entries = retry_transient(folder, list_folder)
    return {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in entries if entry["type"] == "file"}


def is_taken(folder: epath.Path) -> bool:
    """Returns True for an existing file or a folder that is not empty. Raises as `retry_transient` does."""
    return retry_transient(folder, lambda: folder.exists() and (not folder.is_dir() or any(folder.iterdir())))


def size(path: str | os.PathLike[str]) -> int:
    """Returns the size of a remote file in bytes. Raises as `retry_transient` does."""
    store, name = store_of(path)
    return retry_transient(path, lambda: int(store.info(name)["size"]))


def exists(path: epath.Path) -> bool:
    """Returns True if the file or folder exists. Raises as `retry_transient` does."""
    return retry_transient(path, path.exists)


def files(path: str) -> list[str]:
    """Returns the remote files that a path, a folder or a pattern matches, sorted; for a folder all files below it.

    Files and folders below a folder are skipped if their names begin with a dot, as in shell patterns. Raises as
    `retry_transient` does, and InputError for a path that the store's file system cannot have.
    """
    store, name = store_of(path)

    def is_there() -> bool:
        try:
            store.info(name)
        except FileNotFoundError:
            return False
        return True  # `exists` of fsspec and of huggingface_hub takes most errors for a missing file

    def is_shown(file: str, folder: str) -> bool:
        return not any(part.startswith(".") for part in file.removeprefix(folder).split("/"))

    def find() -> list[str]:
        if is_there():  # first, because a file name may contain pattern characters
            return [file for file in store.find(name) if file == name or is_shown(file, name)]
        if not has_magic(name):
            return []
        below = {folder: store.find(folder) for folder in store.glob(name)}
        return [file for folder, files in below.items() for file in files if file == folder or is_shown(file, folder)]

    try:
        found = retry_transient(path, find)
    except (ValueError, NotImplementedError) as error:  # huggingface_hub's, for a repository without its owner
        raise InputError(f"{path}: {describe_error(error)}; expected {_example(path)}") from error
    return sorted({store.unstrip_protocol(file) for file in found})


def version(path: str) -> str:
    """Returns a version string of a remote file, which changes with every write. Raises as `retry_transient` does."""
    store, name = store_of(path)
    return retry_transient(path, lambda: str(store.ukey(name)))


def open_to_read(path: str) -> BinaryIO:
    """Opens a remote file, seekable, for reading; resumes after lost connections. Raises as `retry_transient` does."""
    return io.BufferedReader(_PatientFile(path), 1 << 20)


class _PatientFile(io.RawIOBase):
    def __init__(self, path: str):
        store, name = store_of(path)
        self._path = path
        self._file: Any = retry_transient(path, lambda: store.open(name, "rb"))

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

        block = retry_transient(self._path, read)
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _limit_silence() -> None:
    """Sets a timeout for silent connections to Google. By default, even a slow upload fails for good after 5 min."""
    if importlib.util.find_spec("aiohttp") is not None:
        import aiohttp

        silence = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
        fsspec.config.conf.setdefault("gcs", {}).setdefault("requests_timeout", silence)


def store_of(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """Returns the file system of a remote path, and the path within it."""
    _limit_silence()
    return fsspec.core.url_to_fs(os.fspath(path))
