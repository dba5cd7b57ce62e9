"""Targets of compilation: TPUs by libtpu's names, or the devices of this machine."""

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from bert_jax.errors import BertJaxError, InputError
from bert_jax.extras import install_hint
from bert_jax.parallel.mesh import count_slices

LARGEST = {
    "v2": (16, 16), "v3": (32, 32), "v4": (16, 16, 16), "v5e": (16, 16), "v5p": (16, 20, 28), "v6e": (16, 16),
    "tpu7x": (16, 24, 24),
}  # fmt: skip
"""Sizes in chips of the largest slice. libtpu opens larger ones, which do not exist, and aborts when it compiles."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_ENVIRONMENT = {  # of libtpu
    "TPU_SKIP_MDS_QUERY": "1",  # outside of Google Cloud the query would time out,
    "TPU_WORKER_HOSTNAMES": "localhost",  # and log missing metadata on stderr
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process may compile or train at the same time
}


@dataclass(frozen=True)
class Target:
    """Devices to compile for. A program can use `hbm_bytes` of the memory of each; None if unknown, as for CPUs."""

    topology: str
    slices: int
    devices: tuple[Any, ...]
    hbm_bytes: int | None


def open_target(topology: str | None, slices: int = 1) -> Target:
    """Opens TPUs by libtpu's name for the chips of a slice, such as `v5e:4x4` or `v5p:4x4x8`.

    No TPU is needed, and one in use is not touched. None opens the devices of this machine, named as in `cpu:8`.
    InputError if no such slice exists, or libtpu is missing.
    """
    if slices < 1 or (slices > 1 and topology is None):
        raise InputError(f"num_slices={slices}: expected at least 1, or several of a --topology such as v5e:4x4")
    if topology is None:
        devices: tuple[Any, ...] = tuple(jax.devices())
        name = f"{devices[0].platform}:{len(devices)}"
        return Target(name, count_slices(devices), devices, _usable_memory(devices[0]))
    name, _, shape = topology.partition(":")
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else []
    largest = LARGEST.get(name, ())
    if not sizes or len(sizes) != len(largest) or any(map(int.__gt__, sorted(sizes), sorted(largest))):
        slices_of_chips = ", ".join(f"{chip}:{'x'.join(map(str, most))}" for chip, most in LARGEST.items())
        raise InputError(f"topology={topology}: expected a slice such as v5e:4x4, of at most {slices_of_chips}")
    if not importlib.util.find_spec("libtpu"):
        raise InputError(f"compile requires libtpu; run: {install_hint('tpu-aot')}")
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if len(sizes) == 2 and math.prod(sizes) < 4:
        options["chips_per_host_bounds"] = [*sizes, 1]  # a part of a host
    if name == "v4":
        options["chip_config_name"] = "megacore"  # a chip is one device, as on Cloud TPU
    jax.config.update("jax_platforms", "cpu")  # only the compiler is used, not a device of this machine
    try:
        devices = tuple(topologies.get_topology_desc(topology, "tpu", **options).devices)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"topology={topology}: libtpu does not support it ({reason}); try v5e:4x4") from error
    return Target(topology, slices, devices, _usable_memory(devices[0]))


def _usable_memory(device: Any) -> int | None:
    """Returns the bytes of a device's memory that a program can use; of a TPU from the compiler, which enforces it."""
    if device.platform != "tpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    sharding = jax.sharding.SingleDeviceSharding(device)
    huge = jax.ShapeDtypeStruct((1 << 18, 1 << 18), jnp.float32, sharding=sharding)
    try:
        jax.jit(lambda x: jnp.cumsum(x, 0) + x.T).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        if needs := out_of_memory(error):
            return needs[1]
    raise BertJaxError(f"{device.device_kind}: usable HBM unknown; expected an out-of-memory error from the compiler")


def out_of_memory(error: Exception) -> tuple[int, int] | None:
    """Parses (bytes needed, bytes available) from the compiler's out-of-memory error; None for another error."""
    text = str(error)
    size = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"(?:Used |\(){size}\)? (?:of|exceeds available HBM) \(?{size}", text)
    if "RESOURCE_EXHAUSTED" not in text or not found:
        return None
    needed, available = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
    return needed, available
