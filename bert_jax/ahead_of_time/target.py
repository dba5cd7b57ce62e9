"""Targets of compilation: TPUs by libtpu's names, NVIDIA GPUs by theirs, or the devices of this machine."""

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from bert_jax.ahead_of_time.gpu_target import COMPILER_OPTIONS, GPUS, gpu_options
from bert_jax.errors import BertJaxError, InputError
from bert_jax.extras import install_hint
from bert_jax.parallel.mesh import count_slices
from bert_jax.tracking.flops import Accelerator, find_accelerator

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_FLAT = ("v2", "v3", "v5e", "v6e")
"""Chips with a two-dimensional torus."""

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
    """Devices to compile for.

    `hbm_bytes` of memory are usable by a program; None if that is unknown, as for the CPUs and GPUs of this machine.
    """

    topology: str
    slices: int
    devices: tuple[Any, ...]
    hbm_bytes: int | None

    @property
    def accelerator(self) -> Accelerator | None:
        """Rates of a device; None if `tracking.flops` does not know it."""
        return find_accelerator(self.devices[0].device_kind)

    @property
    def is_absent_gpu(self) -> bool:
        """True for GPUs that this machine need not have."""
        return self.topology.partition(":")[0] in GPUS

    @property
    def compiler_options(self) -> dict[str, str | bool] | None:
        """Options of `jax.stages.Lowered.compile`."""
        return COMPILER_OPTIONS if self.is_absent_gpu else None


def open_target(topology: str | None, slices: int = 1) -> Target:
    """Opens TPUs by libtpu's name for the chips of a slice (`v5e:4x4`, `v5p:4x4x8`), or GPUs (`h100:8`, `h200:4x8`).

    No TPU or GPU is needed, and one in use is not touched. None opens the devices of this machine, as `cpu:8`.
    InputError if the compiler is missing or does not know the name.
    """
    if topology is None:
        devices: tuple[Any, ...] = tuple(jax.devices())
        name = f"{devices[0].platform}:{len(devices)}"
        return Target(name, count_slices(devices), devices, _usable_memory(devices[0]))
    name, _, shape = topology.partition(":")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", shape):
        raise InputError(
            f"--topology={topology}: expected a chip and at least 1 in each dimension, such as v5e:4x4 or h100:8"
        )
    if slices < 1 or (slices > 1 and name in GPUS):
        raise InputError(f"--num_slices={slices}: expected at least 1, and 1 for GPUs, whose hosts are h100:{slices}x8")
    sizes = [int(size) for size in shape.split("x")]
    options = gpu_options(topology, sizes) if name in GPUS else _tpu_options(topology, sizes)
    if slices > 1:
        options["num_slices"] = slices
    jax.config.update("jax_platforms", "cpu")  # only the compiler is used, not a device of this machine
    try:
        devices = tuple(topologies.get_topology_desc(**options).devices)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"--topology={topology}: not supported by the compiler ({reason})") from error
    memory = GPUS[name].usable_bytes if name in GPUS else _usable_memory(devices[0])
    return Target(topology, slices, devices, memory)


def _tpu_options(topology: str, sizes: list[int]) -> dict[str, Any]:
    """Returns the arguments of `get_topology_desc`, and sets libtpu's environment."""
    name = topology.partition(":")[0]
    if len(sizes) < 2 or (name in _FLAT and len(sizes) > 2):
        raise InputError(
            f"--topology={topology}: expected {'two' if name in _FLAT else 'two or three'} dimensions of a TPU slice, "
            f"such as v5e:2x4 or v5p:2x2x2, or one of GPUs, which are {', '.join(GPUS)}"
        )
    if not importlib.util.find_spec("libtpu"):
        raise InputError(f"compile requires libtpu; run: {install_hint('tpu-aot')}")
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    options: dict[str, Any] = {"topology_name": topology, "platform": "tpu"}
    if name in _FLAT and math.prod(sizes) < 4:
        options["chips_per_host_bounds"] = [*sizes, 1]  # a part of a host
    if name == "v4":
        options["chip_config_name"] = "megacore"  # a chip is one device, as on Cloud TPU
    return options


def _usable_memory(device: Any) -> int | None:
    """Returns the usable HBM of a TPU, from the compiler's error for a program that is far too large, else None."""
    if device.platform != "tpu":
        return None
    sharding = jax.sharding.SingleDeviceSharding(device)
    huge = jax.ShapeDtypeStruct((1 << 18, 1 << 18), jnp.float32, sharding=sharding)
    try:
        jax.jit(lambda x: jnp.cumsum(x, 0) + x.T).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        if needs := out_of_memory(error):
            return needs[1]
        raise
    raise BertJaxError(f"{device.device_kind}: usable HBM unknown; expected an out-of-memory error from the compiler")


def out_of_memory(error: Exception) -> tuple[int, int] | None:
    """Parses (bytes needed, bytes available) from the compiler's out-of-memory error; None for another error."""
    text = str(error)
    size = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"Used {size} of {size} hbm", text) or re.search(
        rf"memory required for [\w ]+ \({size}\) exceeds available HBM \({size}\)", text
    )
    if "RESOURCE_EXHAUSTED" not in text or not found:
        return None
    needed, available = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
    return needed, available
