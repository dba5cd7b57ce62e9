"""How the C library's allocator treats the memory of a process that computes on a CPU."""

import contextlib
import ctypes
import os
from pathlib import Path

_DEVICES = ("nvidia0", "nvidiactl", "accel0", "accel", "vfio", "kfd")  # of GPUs and TPUs, in /dev
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # mallopt's, in glibc


def keep_freed_memory() -> None:
    """What is freed stays with the process, where it computes on a CPU and the C library is glibc; else nothing.

    XLA for CPUs allocates the temporaries of each step anew. By default glibc hands them back in between, and the
    kernel fills the pages with zeros again: some 60,000 page faults and a sixth of the time of a step of BERT-Mini. To
    be called before there are threads, which would have arenas of their own.
    """
    if os.environ.get("JAX_PLATFORMS", "") != "cpu" and any((Path("/dev") / name).exists() for name in _DEVICES):
        return
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        libc = ctypes.CDLL("libc.so.6")
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 256 << 20), (_ARENA_MAX, 1)):
            libc.mallopt(parameter, value)
