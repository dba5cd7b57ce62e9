"""Errors of commands and their exit statuses, and the command that installs what an error misses.

The command line exits with 2 for input that the user can fix, 1 for a failure in a run, and 75 (`EX_TEMPFAIL`) for a
stopped run, which resumes when the same command is rerun.
"""


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


def install_hint(extra: str) -> str:
    """Returns the pip command that installs the requirements of an extra, for an installed package or clone."""
    return f"pip install 'bert-jax[{extra}]'"
