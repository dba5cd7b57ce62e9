"""CPU devices that are as strict as TPUs and GPUs: what a CPU gives for nothing is an error here.

    python -m support.strict_device pretrain --config=...    runs a command of `bert-jax` on strict devices

- An implicit copy to the host is refused inside `jax.transfer_guard("disallow")`, as the guard does on a device, and in
  code of bert_jax everywhere: it has to use `jax.device_get`.
- A copy to the host never shares memory with the array, and an array never shares memory with a numpy array.
- A numpy array that is written to before the program that reads it has started is an error: the transfer may still run.
- A donated array is deleted, also where a CPU could not reuse its memory.
- The replicas of each array of a program, arguments and results, have equal bits on all devices of all processes.
- Arrays of other processes cannot be read; JAX refuses that on a CPU as well.
"""

import ctypes
import functools
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import array, distributed
from jax._src.lib import guard_lib  # the guard's level has no public name

import bert_jax

_PACKAGE = os.path.dirname(bert_jax.__file__)
_ARRAYS = os.path.dirname(array.__file__), os.path.dirname(np.__file__)  # what the methods of arrays run through
_WAIT_MS = 120_000
_TP_AS_BUFFER = 20 * ctypes.sizeof(ctypes.c_void_p)  # its offset in CPython's PyTypeObject


class StrictDeviceError(AssertionError):
    """Use of an array that would fail, or differ, on a device."""


# --- Copies to the host ----------------------------------------------------------------------------------------------


def _check_copy_to_host() -> None:
    state = guard_lib.thread_local_state()
    if state.explicit_device_get:
        return
    level = state.device_to_host or guard_lib.global_state().device_to_host
    if level in (guard_lib.TransferGuardLevel.DISALLOW, guard_lib.TransferGuardLevel.DISALLOW_EXPLICIT):
        raise StrictDeviceError("Disallowed device-to-host transfer, inside a transfer guard")
    frame: Any = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith((*_ARRAYS, __file__, "<")):
        frame = frame.f_back
    if frame and frame.f_code.co_filename.startswith(_PACKAGE):
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        raise StrictDeviceError(f"{place}: implicit device-to-host transfer; use jax.device_get")


def _forget_buffer_protocol(cls: type) -> None:
    """Removes the type's `bf_getbuffer` for good: NumPy reads a CPU's array by it, and any other device's by a copy."""
    procs = ctypes.c_void_p.from_address(id(cls) + _TP_AS_BUFFER).value
    assert procs is not None
    ctypes.c_void_p.from_address(procs).value = None


def _strict_copies(patch: pytest.MonkeyPatch) -> None:
    value, start = array.ArrayImpl._value, array.ArrayImpl.copy_to_host_async

    def strict_value(self: Any) -> np.ndarray:
        self._check_if_deleted()
        if self._npy_value is None:
            _check_copy_to_host()
            copied = np.array(value.fget(self))
            copied.flags.writeable = False
            self._npy_value = copied
        return self._npy_value

    def strict_start(self: Any) -> Any:
        if self._npy_value is None:
            _check_copy_to_host()
        return start(self)

    _forget_buffer_protocol(array.ArrayImpl)
    patch.setattr(array.ArrayImpl, "_value", property(strict_value))
    patch.setattr(array.ArrayImpl, "copy_to_host_async", strict_start)


# --- Copies to devices -----------------------------------------------------------------------------------------------

_in_flight: list[tuple[np.ndarray, bytes]] = []  # host arrays whose transfer may still run, and their digests
_lock = threading.Lock()


def _hand_over(value: Any) -> Any:
    """Returns a copy of a numpy array for the device; other values are returned as they are."""
    if not isinstance(value, np.ndarray):
        return value
    with _lock:
        _in_flight.append((value, _digest(value)))
    return value.copy()


def _check_in_flight() -> None:
    with _lock:
        sent, _in_flight[:] = _in_flight[:], []
    if changed := [value.shape for value, digest in sent if _digest(value) != digest]:
        raise StrictDeviceError(f"numpy arrays {changed} were written to while they may be copied to devices")


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).digest()


def _strict_transfers(patch: pytest.MonkeyPatch) -> None:
    put, from_callback, wait = jax.device_put, jax.make_array_from_callback, jax.block_until_ready

    @functools.wraps(put)
    def strict_put(tree: Any, *arguments: Any, **options: Any) -> Any:
        return put(jax.tree.map(_hand_over, tree), *arguments, **options)

    @functools.wraps(from_callback)
    def strict_from_callback(shape: Any, sharding: Any, callback: Any, *arguments: Any, **options: Any) -> Any:
        return from_callback(shape, sharding, lambda index: _hand_over(callback(index)), *arguments, **options)

    @functools.wraps(wait)
    def strict_wait(tree: Any) -> Any:
        _check_in_flight()
        return wait(tree)

    patch.setattr(jax, "block_until_ready", strict_wait)
    patch.setattr(jax, "device_put", strict_put)
    patch.setattr(jax, "make_array_from_callback", strict_from_callback)


# --- Programs --------------------------------------------------------------------------------------------------------


class StrictProgram:
    """A jitted function whose donated arguments are deleted, and whose replicated arrays are compared."""

    def __init__(self, jitted: Any, donated: Any):
        self._jitted, self._donated = jitted, donated

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _run(self._jitted, self._donated, arguments, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


def _run(program: Any, donated: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    leaves = jax.tree.leaves((arguments, options))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return program(*arguments, **options)
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise StrictDeviceError(f"an array {leaf.shape} that was donated or deleted is an argument of {program}")
    _check_in_flight()
    _check_replicas("arguments", program, leaves)
    results = program(*arguments, **options)
    kept = {id(leaf) for leaf in jax.tree.leaves(results)}
    for leaf in jax.tree.leaves(donated(arguments, options)):
        if isinstance(leaf, jax.Array) and id(leaf) not in kept and not leaf.is_deleted():
            leaf.delete()
    _check_replicas("results", program, jax.tree.leaves(results))
    return results


_meetings = 0


def _check_replicas(what: str, program: Any, leaves: list[Any]) -> None:
    """Raises StrictDeviceError, in all processes, if replicas of an array differ."""
    if threading.current_thread() is not threading.main_thread():
        return
    digests: list[dict[str, str]] = []
    for leaf in leaves:
        if not isinstance(leaf, jax.Array) or (
            leaf.sharding.is_fully_addressable and len(leaf.sharding.device_set) == 1
        ):
            continue
        shards: dict[str, str] = {}
        digests.append(shards)
        for shard in leaf.addressable_shards:
            data = (
                jax.random.key_data(shard.data)
                if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                else shard.data
            )
            digest = _digest(jax.device_get(data)).hex()
            if shards.setdefault(str(shard.index), digest) != digest:
                shards[str(shard.index)] = "differ"
    differ = [number for number, shards in enumerate(digests) if "differ" in shards.values()]
    client = distributed.global_state.client
    if client is not None and digests:
        global _meetings
        _meetings += 1
        key = f"strict_device/{_meetings}"
        client.key_value_set(f"{key}/{jax.process_index()}", json.dumps(digests))
        for process in range(jax.process_count()):
            others = json.loads(client.blocking_key_value_get(f"{key}/{process}", _WAIT_MS))
            for number, (mine, theirs) in enumerate(zip(digests, others, strict=True)):
                if any(mine.get(index, digest) != digest or digest == "differ" for index, digest in theirs.items()):
                    differ.append(number)
    if differ:
        raise StrictDeviceError(f"{what} {sorted(set(differ))} of {program}: replicas differ between devices")


def _strict_programs(patch: pytest.MonkeyPatch) -> None:
    jit, call = jax.jit, jax.stages.Compiled.__call__

    @functools.wraps(jit)
    def strict_jit(function: Any, **options: Any) -> Any:
        jitted = jit(function, **options)
        if not sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
            return jitted
        numbers = options.get("donate_argnums", ())
        numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
        assert not options.get("donate_argnames")
        return StrictProgram(jitted, lambda arguments, _: [arguments[n] for n in numbers if n < len(arguments)])

    def strict_call(self: Any, *arguments: Any, **options: Any) -> Any:
        def donated(arguments: Any, options: Any) -> list[Any]:
            info = jax.tree.leaves(self.args_info)
            return [
                leaf for leaf, about in zip(jax.tree.leaves((arguments, options)), info, strict=True) if about.donated
            ]

        return _run(functools.partial(call, self), donated, arguments, options)

    patch.setattr(jax, "jit", strict_jit)
    patch.setattr(jax.stages.Compiled, "__call__", strict_call)


# --- Use -------------------------------------------------------------------------------------------------------------


@contextmanager
def strict_devices() -> Iterator[None]:
    """Makes the devices of this process strict."""
    with pytest.MonkeyPatch.context() as patch:
        _strict_copies(patch)
        _strict_transfers(patch)
        _strict_programs(patch)
        yield


if __name__ == "__main__":
    from bert_jax.cli import entry_point

    with strict_devices():
        status = entry_point()
    sys.exit(status)
