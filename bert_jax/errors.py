"""The two ways a command can fail, and the one way it can stop half-way.

The command line turns these into exit statuses: 2 for input that the user can mend, 1 for a failure in
a run, 75 (`EX_TEMPFAIL`) for a run that has saved its state and goes on when the same command is run again.
"""


class BertJaxError(Exception):
    """A failure in a run: a non-finite loss, a lost peer, a checkpoint that could not be written."""

    exit_status = 1


class InputError(BertJaxError):
    """Something the user gave that the user can mend. The message says what, where, and what to do."""

    exit_status = 2


class Interrupted(BertJaxError):
    """The run was asked to stop and has saved; the same command continues it."""

    exit_status = 75


class NotBegun(Interrupted):
    """The run was asked to stop before there was anything to save."""
