"""A map over independent tasks in a pool of processes."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import TypeVar

from bert_jax.errors import BertJaxError

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_tasks(function: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> Iterator[tuple[Task, Result]]:
    """(task, result) pairs as they finish, from `workers` processes; from this one where one is enough."""
    if min(workers, len(tasks)) <= 1:
        for task in tasks:
            yield task, function(task)
        return
    # Spawned, not forked: the tokenizer and ArrayRecord have threads, and a fork inherits their locks.
    pool = ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), initializer=_start_worker)
    try:
        waiting: dict[Future[Result], Task] = {}
        rest = iter(tasks)
        while True:
            for task in itertools.islice(rest, 2 * workers - len(waiting)):  # a short queue: tasks hold memory
                waiting[pool.submit(function, task)] = task
            if not waiting:
                return
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield waiting.pop(future), future.result()
    except BrokenProcessPool as error:
        raise BertJaxError(
            "a worker died, most likely for want of memory: give fewer --workers or a smaller --bucket_tokens"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def one_thread() -> None:
    """For a worker that has a core to itself."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is a core: its tokenizer starts no threads of its own


def _start_worker() -> None:
    one_thread()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()  # one that is killed with -9 tells its workers nothing
    os._exit(1)
