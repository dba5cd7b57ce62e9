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

_PATH_ERRORS = {  # errno of a bad path given by the user
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EROFS,
}  # fmt: skip

_HOME = re.compile(r"^(--[\w.-]+=)~(?=/|$)")

log = logging.getLogger(__name__)

_INTERRUPTED = 130

_COMPUTING = {"check", "pretrain", "evaluate", "finetune", "predict", "study"}
_IMPORTS_JAX = _COMPUTING | {"fill-mask", "features", "export", "import", "compile"}


def entry_point() -> int:
    """Runs `main` as the program and returns its exit status."""
    show_background_errors()
    if sys.argv[1:2] and sys.argv[1] in _COMPUTING:
        tune_malloc()
    status = main()
    if _leaves_threads(status):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _leaves_threads(status: int) -> bool:
    """Returns whether the end of the interpreter would crash or wait because of JAX's threads."""
    if status == _INTERRUPTED:
        return "jax" in sys.modules  # XLA may still be compiling or computing
    if status and "bert_jax.runtime.processes" in sys.modules:
        from bert_jax.runtime.processes import ends_alone

        return ends_alone()
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    set_up_logging(quiet=options.quiet)
    for library in ("gcsfs", "fsspec"):  # log an error that they raise, too, with its traceback
        logging.getLogger(library).addHandler(logging.NullHandler())
        logging.getLogger(library).propagate = False
    if options.command in _IMPORTS_JAX and "jax" not in sys.modules:
        log.info("Importing JAX")
    try:
        options.run(options)
        return 0
    except BertJaxError as error:
        return _fail(options.command, str(error), error.exit_status)
    except KeyboardInterrupt:
        return _fail(options.command, "interrupted", _INTERRUPTED)
    except Exception as error:
        if (disk := _disk_failure(error)) is not None:
            output = getattr(options, "output", None) or getattr(options, "workdir", None)
            where = _file_of(error) or (f"output: {output}" if output else "")
            return _fail(options.command, f"{disk[0]}{f' ({where})' if where else ''}; {disk[1]}", 1)
        if isinstance(error, BrokenPipeError):  # the reader of the pipe, such as `head`, has exited
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        if isinstance(error, OSError) and error.errno in _PATH_ERRORS:
            return _fail(options.command, f"{error.filename or error}: {error.strerror}", 2)
        if isinstance(error, (FileNotFoundError, PermissionError)):  # of a store
            return _fail(options.command, f"{type(error).__name__}: {error}", 2)
        traceback.print_exc()
        return 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a subcommand, as `arguments.parse` does, with the home folder for "~" in `--NAME=~/...`.

    A shell replaces it only at the start of a word.
    """
    return parse_arguments([_HOME.sub(lambda option: f"{option[1]}{Path.home()}", word) for word in arguments], _RUN)


def _fail(command: str, message: str, status: int) -> int:
    print(f"bert-jax {command}: {' '.join(message.split())}", file=sys.stderr)
    return status


_DISK_FAILURES = {
    errno.ENOSPC: ("the disk is full", "free space and run it again"),
    errno.EDQUOT: ("the disk quota is exceeded", "free space or raise the quota, and run it again"),
    errno.EFBIG: ("a file is larger than the limit", "raise it (`ulimit -f`), and run it again"),
    errno.EIO: ("the disk failed to read or write", "check it (`dmesg`), and run it again"),
}


def _disk_failure(error: BaseException | None) -> tuple[str, str] | None:
    """Returns what is wrong with a disk and what to do, None for an error of another cause."""
    while error is not None:
        for number, failure in _DISK_FAILURES.items():
            if isinstance(error, OSError) and error.errno == number:
                return failure
            if os.strerror(number) in str(error):  # as TensorStore and ArrayRecord say it
                return failure
        error = error.__cause__ or error.__context__
    return None


def _file_of(error: BaseException | None) -> str:
    """Returns the file that an error names, "" without one: those of libraries have a path in quotes in the text."""
    while error is not None:
        if isinstance(error, OSError) and error.filename:
            return os.fsdecode(error.filename)
        paths = re.findall(r"""["'](/[^"']+)["']""", str(error))
        if found := [path for path in paths if not path.endswith(".py")]:  # which are those of a worker's traceback
            result: str = found[0]
            return result
        error = error.__cause__ or error.__context__
    return ""


_RUN = {
    "check": training_commands.run_check,
    "vocab": data_commands.run_vocab,
    "prepare": data_commands.run_prepare,
    "inspect": data_commands.run_inspect,
    "pretrain": training_commands.run_pretrain,
    "evaluate": model_commands.run_evaluate,
    "finetune": training_commands.run_finetune,
    "predict": model_commands.run_predict,
    "study": training_commands.run_study,
    "fill-mask": model_commands.run_fill_mask,
    "features": model_commands.run_features,
    "export": model_commands.run_export,
    "import": model_commands.run_import,
    "compile": training_commands.run_compile,
    "report": listing_commands.run_report,
    "configs": listing_commands.run_configs,
    "completion": listing_commands.run_completion,
}
"""The function of each subcommand."""

if __name__ == "__main__":
    sys.exit(entry_point())
