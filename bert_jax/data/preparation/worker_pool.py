"""Parallel map over independent tasks with a process pool."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import TypeVar

from bert_jax.errors import BertJaxError

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_tasks(function: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """Yields the results of tasks in order, from `workers` processes; from this process if one is sufficient.

    Workers log to stderr, at the level of this process.
    """
    if min(workers, len(tasks)) <= 1:
        yield from map(function, tasks)
        return
    # Spawned, not forked: the tokenizer and ArrayRecord have threads, and a fork would copy their locks.
    level = logging.getLogger("bert_jax").getEffectiveLevel()
    with ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), _start_worker, (level,)) as pool:
        try:
            yield from pool.map(function, tasks)
        except BrokenProcessPool as error:
            raise BertJaxError(
                f"workers={workers}: a worker died, out of memory (use fewer, or a smaller --bucket_tokens), or "
                'because a script calls prepare outside of `if __name__ == "__main__":`'
            ) from error


def _start_worker(level: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker has one core
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("bert_jax").setLevel(level)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()  # a parent killed with -9 cannot notify its workers
    os._exit(1)
