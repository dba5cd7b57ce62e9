"""TPUs to compile for, by libtpu's names for them."""

import importlib.metadata
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from bert_jax.errors import BertJaxError, InputError
from bert_jax.tracking.accelerators import Accelerator, find_accelerator

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


_FLAT = ("v2", "v3", "v5e", "v6e")
"""Chips whose links make a torus of two dimensions."""

_ENVIRONMENT = {  # of libtpu
    "TPU_SKIP_MDS_QUERY": "1",  # who is not on Google Cloud would wait for its answer,
    "TPU_WORKER_HOSTNAMES": "localhost",  # and be told on stderr what it did not say
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # others may compile, or train, at the same time
}


@dataclass(frozen=True)
class Target:
    """TPUs to compile for. `accelerator` is None for those of which `training.accelerators` knows nothing."""

    topology: str
    slices: int
    devices: tuple[Any, ...]
    hbm_bytes: int  # that a program may use
    accelerator: Accelerator | None


def open_target(topology: str, slices: int = 1) -> Target:
    """The devices of a topology by libtpu's name for it, the chips of a slice: `v5e:4x4`, `v5p:4x4x8`.

    No process has to have, or to leave alone, a TPU. InputError where libtpu is missing or does not know the name.
    """
    if not re.fullmatch(r"[a-z0-9]+:\d+(x\d+){1,2}", topology):
        raise InputError(f"--topology={topology}: a chip and how many stand in each direction, as in v5e:4x4")
    name, sizes = topology.partition(":")[0], [int(size) for size in topology.partition(":")[2].split("x")]
    if name in _FLAT and len(sizes) > 2:
        raise InputError(f"--topology={topology}: {name} chips stand in two directions, as in {name}:4x4")
    if slices < 1:
        raise InputError(f"--num_slices is at least 1, not {slices}")
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError("compile needs libtpu: pip install 'bert-jax[tpu-aot]'") from error
    jax.config.update("jax_platforms", "cpu")  # the compiler alone: not the TPUs of this machine, if it has some
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
        raise InputError(f"--topology={topology}: libtpu does not make it ({reason})") from error
    return Target(
        topology, slices, tuple(devices), _usable_memory(devices[0]), find_accelerator(devices[0].device_kind)
    )


def _usable_memory(device: Any) -> int:
    """What a program may use of a device's HBM: the compiler says so of one that wants far too much."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    huge = jax.ShapeDtypeStruct((1 << 18, 1 << 18), jnp.float32, sharding=sharding)
    try:
        jax.jit(lambda x: jnp.cumsum(x, 0) + x.T).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        if needs := out_of_memory(error):
            return needs[1]
        raise
    raise BertJaxError(f"{device.device_kind} holds 256 GiB, or the compiler does not say what it holds")


def out_of_memory(error: Exception) -> tuple[int, int] | None:
    """(bytes wanted, bytes there are) from what the compiler says of too little HBM; None for another error."""
    text = str(error)
    size = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"Used {size} of {size} hbm", text) or re.search(
        rf"memory required for [\w ]+ \({size}\) exceeds available HBM \({size}\)", text
    )
    if "RESOURCE_EXHAUSTED" not in text or not found:
        return None
    wanted, there_is = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
    return wanted, there_is
