"""Errors of commands and their exit statuses, and the command that installs what an error misses.

The command line exits with 2 for input that the user can fix, 1 for a failure in a run, and 75 (`EX_TEMPFAIL`) for a
stopped run, which resumes when the same command is rerun.
"""

import re
from importlib import metadata


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


PACKAGE = "bert-jax"


def install_hint(extra: str) -> str:
    """Returns the pip command that installs the requirements of an extra, such as `pip install 'gcsfs>=2024.6'`.

    It works wherever this package was installed from, an index or a clone.
    """
    pattern = re.compile(rf"""(.+?)\s*;\s*extra\s*==\s*['"]{re.escape(extra)}['"]""")
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        lines = []
    required = [match[1] for line in lines if (match := pattern.fullmatch(line))]
    if not required:  # a clone that is on the path without being installed, or was installed before it had the extra
        return f"pip install -e '.[{extra}]'"
    return f"pip install {' '.join(repr(requirement) for requirement in required)}"
