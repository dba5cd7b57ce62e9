"""The `bert-jax` command: parses options, calls one function per subcommand, maps failures to exit statuses.

0   success
1   the run failed
2   invalid input that the user can fix; one line on stderr says how
75  stopped and saved; the same command resumes the run
"""

import argparse
import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from bert_jax.command_line.arguments import parse as parse_arguments
from bert_jax.command_line.console import set_up_logging
from bert_jax.errors import BertJaxError
from bert_jax.runtime.background_errors import show_background_errors
from bert_jax.runtime.malloc import tune_malloc
from bert_jax.subcommands import data_commands, listing_commands, model_commands, training_commands

_PATH_ERRORS = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_DISK_ERRORS = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)]
_HOME = re.compile(r"^(--[\w.-]+=)~(?=/|$)")
_INTERRUPTED = 130
_COMPUTING = {"check", "pretrain", "evaluate", "finetune", "predict", "study"}

_RUN = {
    name.removeprefix("run_").replace("_", "-"): function
    for module in (data_commands, listing_commands, model_commands, training_commands)
    for name, function in vars(module).items()
    if name.startswith("run_")
}
"""The function of each subcommand, such as `run_fill_mask` of "fill-mask"."""


def entry_point() -> int:
    """Runs `main` as the program and returns its exit status."""
    show_background_errors()
    if sys.argv[1:2] and sys.argv[1] in _COMPUTING:
        tune_malloc()
    status = main()
    processes = sys.modules.get("bert_jax.runtime.processes")
    # The end of the interpreter would crash or wait: XLA may still compute, or JAX would wait for lost processes.
    if (status == _INTERRUPTED and "jax" in sys.modules) or (status and processes and processes.ends_alone()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    set_up_logging(quiet=options.quiet)
    for library in ("gcsfs", "fsspec"):  # log an error that they raise, too, with its traceback
        logging.getLogger(library).addHandler(logging.NullHandler())
        logging.getLogger(library).propagate = False
    try:
        options.run(options)
        return 0
    except BertJaxError as error:
        return _fail(options.command, str(error), error.exit_status)
    except KeyboardInterrupt:
        return _fail(options.command, "interrupted", _INTERRUPTED)
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if message := _disk_error(error):
            return _fail(options.command, f"{message}; free space, or check disk and limits, and run it again", 1)
        if isinstance(error, _PATH_ERRORS) or getattr(error, "errno", 0) in (errno.ENAMETOOLONG, errno.EROFS):
            return _fail(options.command, str(error), 2)
        traceback.print_exc()
        return 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a subcommand, as `arguments.parse` does, with the home folder for "~" in `--NAME=~/...`.

    A shell replaces it only at the start of a word.
    """
    return parse_arguments([_HOME.sub(lambda option: f"{option[1]}{Path.home()}", word) for word in arguments], _RUN)


def _disk_error(error: BaseException | None) -> str:
    """Returns the error of a full or failing disk, with its file or what a library says; "" for another cause."""
    while error is not None:
        if names := [name for name in _DISK_ERRORS if name in str(error)]:
            return f"{names[0]} ({getattr(error, 'filename', None) or str(error)[:200]})"
        error = error.__cause__ or error.__context__
    return ""


def _fail(command: str, message: str, status: int) -> int:
    print(f"bert-jax {command}: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(entry_point())
