"""The `bert-jax` command: parses options, calls the function of a command, maps failures to exit statuses.

0   success
1   the run failed
2   invalid input that the user can fix; one line on stderr says how
75  stopped and saved; the same command resumes the run
"""

import argparse
import errno
import inspect
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from bert_jax.command_line import arguments
from bert_jax.command_line.arguments import parse
from bert_jax.command_line.console import bars, set_up_logging
from bert_jax.commands import data, models, runs  # whose functions are the commands
from bert_jax.errors import BertJaxError, exit_status
from bert_jax.progress import silent
from bert_jax.runtime.interpreter import StopSignal, show_background_errors, tune_malloc

__all__ = ["data", "entry_point", "main", "models", "parse", "runs"]

_DISK_ERRORS = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)]
_INTERRUPTED = 130
_JOINED = {"check", "pretrain", "evaluate", "finetune", "study"}
"""Commands that one process of each host runs together with all others."""


def entry_point() -> int:
    """Runs `main` as the program and returns its exit status."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the locale's encoding may lack letters of a text
    show_background_errors()
    if sys.argv[1:2] and sys.argv[1] in {*_JOINED, "predict"}:
        tune_malloc()
    status = main()
    processes = sys.modules.get("bert_jax.runtime.processes")
    # The end of the interpreter would crash or wait: XLA may still compute, or JAX would wait for lost processes.
    if (status == _INTERRUPTED and "jax" in sys.modules) or (status and processes and processes.ends_alone()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _open_closed_streams() -> None:
    """Opens the null device where stdin, stdout or stderr is closed: the next file would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    options = parse(sys.argv[1:] if words is None else words)
    set_up_logging(quiet=options.quiet)
    for library in ("gcsfs", "fsspec"):  # log an error that they raise, too, with its traceback
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    try:
        _run(options)
        sys.stdout.flush()
        return 0
    except BertJaxError as error:
        return _fail(options.command, arguments.in_options(str(error), options), error.exit_status)
    except KeyboardInterrupt:
        return _fail(options.command, "interrupted", _INTERRUPTED)
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if message := _disk_error(error):
            return _fail(options.command, f"{message}; free space, or check disk and limits, and run it again", 1)
        if isinstance(error, OSError) and (error.filename or error.errno == errno.ENOENT):
            message = str(error) if error.filename else "the working folder was deleted; change to another"
            return _fail(options.command, message, exit_status(error))
        traceback.print_exc()
        return 1


def _run(options: argparse.Namespace) -> None:
    """Calls the function of a command, and prints its result in the first of the processes."""
    more: dict[str, Any] = {}
    parameters = inspect.signature(arguments.COMMANDS[options.command]).parameters
    is_first, is_run = True, options.command in _JOINED and not getattr(options, "dry_run", False)
    with ExitStack() as stack:
        if "stop" in parameters and is_run:
            more["stop"] = stack.enter_context(StopSignal())  # before the imports, which take seconds
        if is_run:
            from bert_jax.runtime import processes

            stack.enter_context(processes.joined_processes())
            is_first = processes.is_first()
        if "bars" in parameters:
            more["bars"] = silent if options.quiet or not is_first else bars()
        result = arguments.call(options, **more)
        if is_first and (text := result.to_json() if options.json or result.text is None else result.text):
            print(text)
    if result.error:
        raise result.error


def _disk_error(error: BaseException | None) -> str:
    """Returns the error of a full or failing disk, with its file or what a library says; "" for another cause."""
    while error is not None:
        if names := [name for name in _DISK_ERRORS if name in str(error)]:
            return f"{names[0]} ({getattr(error, 'filename', None) or str(error)[:200]})"
        error = error.__cause__ or error.__context__
    return ""


def _fail(command: str, message: str, status: int) -> int:
    line = " ".join(message.split()).encode(errors="backslashreplace").decode()  # it may have a name that is not UTF-8
    with suppress(OSError):
        print(f"bert-jax {command}: {line}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(entry_point())
