"""Targets of compilation: TPUs by libtpu's names, NVIDIA GPUs by theirs, or the devices of this machine."""

import importlib.metadata
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from bert_jax.ahead_of_time.gpu_target import COMPILER_OPTIONS, GPUS, open_gpus
from bert_jax.errors import BertJaxError, InputError
from bert_jax.extras import install_hint
from bert_jax.parallel.mesh import count_slices
from bert_jax.tracking.accelerators import Accelerator, find_accelerator

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
    `accelerator` is None if `tracking.accelerators` does not know the devices.
    """

    topology: str
    slices: int
    devices: tuple[Any, ...]
    hbm_bytes: int | None
    accelerator: Accelerator | None
    is_gpu: bool = False
    """True for GPUs that this machine need not have."""

    @property
    def compiler_options(self) -> dict[str, str | bool] | None:
        """Options of `jax.stages.Lowered.compile`."""
        return COMPILER_OPTIONS if self.is_gpu else None


def open_target(topology: str, slices: int = 1) -> Target:
    """Opens TPUs by libtpu's name for the chips of a slice (`v5e:4x4`, `v5p:4x4x8`), or GPUs (`h100:8`, `h200:4x8`).

    No TPU or GPU is needed, and one in use is not touched. InputError if the compiler is missing or does not know the
    name.
    """
    name, _, shape = topology.partition(":")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", shape):
        raise InputError(
            f"--topology={topology}: expected a chip and at least 1 in each dimension, such as v5e:4x4 or h100:8"
        )
    sizes = [int(size) for size in shape.split("x")]
    if slices < 1 or (slices > 1 and name in GPUS):
        raise InputError(f"--num_slices={slices}: expected at least 1, and 1 for GPUs, whose hosts are h100:{slices}x8")
    if name in GPUS:
        gpus, memory = open_gpus(topology, name, sizes)
        return Target(topology, 1, gpus, memory, find_accelerator(gpus[0].device_kind), is_gpu=True)
    if len(sizes) < 2 or (name in _FLAT and len(sizes) > 2):
        raise InputError(
            f"--topology={topology}: expected {'two' if name in _FLAT else 'two or three'} dimensions of a TPU slice, "
            f"such as v5e:2x4 or v5p:2x2x2, or one of GPUs, which are {', '.join(GPUS)}"
        )
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(f"compile requires libtpu; run: {install_hint('tpu-aot')}") from error
    jax.config.update("jax_platforms", "cpu")  # only the compiler is used, not a TPU of this machine
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if name in _FLAT and math.prod(sizes) < 4:
        options["chips_per_host_bounds"] = [*sizes, 1]  # a part of a host
    if name == "v4":
        options["chip_config_name"] = "megacore"  # a chip is one device, as on Cloud TPU
    try:
        devices: list[Any] = topologies.get_topology_desc(topology, "tpu", **options).devices
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise InputError(f"--topology={topology}: not supported by libtpu ({reason})") from error
    return Target(
        topology, slices, tuple(devices), _usable_memory(devices[0]), find_accelerator(devices[0].device_kind)
    )


def local_target() -> Target:
    """Returns the devices of this machine as a target, named by platform and number, such as `cpu:8`."""
    devices = jax.devices()
    memory = _usable_memory(devices[0]) if devices[0].platform == "tpu" else None
    return Target(
        f"{devices[0].platform}:{len(devices)}", count_slices(devices), tuple(devices), memory,
        find_accelerator(devices[0].device_kind),
    )  # fmt: skip


def _usable_memory(device: Any) -> int:
    """Returns the usable HBM of a device, from the compiler's error for a program that is far too large."""
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
