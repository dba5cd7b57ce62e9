"""Errors of commands and their exit statuses, and the command that installs what an error misses.

The command line exits with 2 for input that the user can fix, 1 for a failure in a run, and 75 (`EX_TEMPFAIL`) for a
stopped run, which resumes when the same command is rerun.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class BertJaxError(Exception):
    """A failure in a run: a non-finite loss, a lost peer, a checkpoint that could not be written."""

    exit_status = 1


class InputError(BertJaxError):
    """Invalid input that the user can fix. The message says what is wrong, where, and how to fix it."""

    exit_status = 2


class Interrupted(BertJaxError):
    """The run received a stop signal and has saved its state; the same command resumes it."""

    exit_status = 75


class NotBegun(Interrupted):
    """The run received a stop signal before there was anything to save."""


_OF_PATHS = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EROFS,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL,
}  # fmt: skip
"""Errors of the system that say that a path is wrong; others, such as a stale NFS handle, may pass."""


def exit_status(error: BaseException) -> int:
    """Returns the exit status of a command that ends with `error`."""
    return 2 if isinstance(error, OSError) and error.errno in _OF_PATHS else getattr(error, "exit_status", 1)


def install_hint(extra: str) -> str:
    """Returns the pip command that installs the requirements of an extra, for an installed package or clone."""
    return f"pip install 'bert-jax[{extra}]'"


@contextmanager
def refused(message: str) -> Iterator[None]:
    """Raises InputError for any Exception, and for a panic of a library in Rust, whose class is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise InputError(f"{message} ({error!s:.300})") from error


@contextmanager
def prefixed(where: object) -> Iterator[None]:
    """Begins the message of an InputError with the file, the row or the key that it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def is_panic(error: BaseException) -> bool:
    """Returns whether an error is a panic of a library in Rust. Each library has such a class, and exports none."""
    return type(error).__name__ == "PanicException"
