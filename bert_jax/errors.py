"""Exceptions and their exit statuses.

The command line exits with 2 for input that the user can fix, 1 for a failure in a run, and 75 (`EX_TEMPFAIL`) for a
run that was stopped and has saved its state: the same command resumes it.
"""


class BertJaxError(Exception):
    """A failure in a run: a non-finite loss, a lost peer, a checkpoint that could not be written."""

    exit_status = 1


class InputError(BertJaxError):
    """Invalid input that the user can fix. The message says what is wrong, where, and what to do."""

    exit_status = 2


class Interrupted(BertJaxError):
    """The run was asked to stop and has saved its state; the same command resumes it."""

    exit_status = 75


class NotBegun(Interrupted):
    """The run was asked to stop before it had any state to save."""
