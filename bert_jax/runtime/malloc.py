"""Tuning of the C library's memory allocator for CPU runs."""

import contextlib
import ctypes
import os
from pathlib import Path

_DEVICES = ("nvidia0", "nvidiactl", "accel0", "accel", "vfio", "kfd")  # GPUs and TPUs in /dev
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # parameters of mallopt in glibc


def tune_malloc() -> None:
    """Tunes glibc malloc to keep freed memory on CPU runs; does nothing elsewhere.

    XLA:CPU allocates the temporaries of each step anew. By default glibc returns them to the kernel in between, which
    zeroes the pages again: some 60,000 page faults and a sixth of the time of a step of BERT-Mini. Never returning them
    matters for large models: a threshold, of at most 2 GiB here, cost BERT-BASE 190,000 faults in most steps. Call it
    before threads start, because each would get its own arena.
    """
    if os.environ.get("JAX_PLATFORMS", "") != "cpu" and any((Path("/dev") / name).exists() for name in _DEVICES):
        return
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL("libc.so.6")
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 256 << 20), (_ARENA_MAX, 1)):
            libc.mallopt(parameter, value)
