"""Parallel map over independent tasks with a process pool."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from logging.handlers import QueueHandler
from multiprocessing import get_context, parent_process
from queue import SimpleQueue
from typing import TypeVar

from bert_jax.errors import BertJaxError

_PACKAGE = logging.getLogger("bert_jax")
_records: SimpleQueue[logging.LogRecord] = SimpleQueue()  # of a task in a worker

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_tasks(function: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> Iterator[tuple[Task, Result]]:
    """Yields (task, result) pairs as they finish, from `workers` processes; from this process if one is sufficient.

    What a task logs is logged by this process when the task is finished.
    """
    if min(workers, len(tasks)) <= 1:
        for task in tasks:
            yield task, function(task)
        return
    # Spawned, not forked: the tokenizer and ArrayRecord have threads, and a fork would copy their locks.
    level = _PACKAGE.getEffectiveLevel()
    pool = ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), _start_worker, (level,))
    try:
        futures = {pool.submit(_run, function, task): task for task in tasks}
        for future in as_completed(futures):
            result, records = future.result()
            for record in records:
                logging.getLogger(record.name).handle(record)
            yield futures.pop(future), result
    except BrokenProcessPool as error:
        raise BertJaxError(
            f"workers={workers}: a worker died, probably out of memory; use fewer or a smaller --bucket_tokens"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def one_thread() -> None:
    """Disables threads of the tokenizer in a worker, which has one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _start_worker(level: int) -> None:
    one_thread()
    _PACKAGE.handlers = [QueueHandler(_records)]
    _PACKAGE.setLevel(level)
    _PACKAGE.propagate = False
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _run(function: Callable[[Task], Result], task: Task) -> tuple[Result, list[logging.LogRecord]]:
    """Runs a task in a worker; returns its result and what it logs."""
    result = function(task)
    return result, [_records.get() for _ in range(_records.qsize())]


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()  # a parent killed with -9 cannot notify its workers
    os._exit(1)
