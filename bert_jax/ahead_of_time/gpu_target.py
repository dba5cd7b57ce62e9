"""NVIDIA GPUs as targets of compilation: XLA's compiler for them needs no GPU, only a description of one."""

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

from bert_jax.errors import InputError
from bert_jax.extras import install_hint

_MIB = 1 << 20
_MEMORY_FRACTION = 0.75
"""Share of a GPU's memory that JAX takes by default; XLA_PYTHON_CLIENT_MEM_FRACTION changes it."""

COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
"""Options of a compilation without a GPU: variants of a kernel cannot be timed, so that the compiler takes its default.

Its products may be slower than those of a run, and their workspaces of another size.
"""


@dataclass(frozen=True)
class Gpu:
    """Sizes and rates of a GPU that the compiler asks for.

    All supported GPUs have warps of 32 threads, and 64 Ki registers per core.

    Attributes:
      kind: JAX's `device_kind`.
      capability: CUDA's compute capability, major and minor.
      cores: number of streaming multiprocessors.
      memory_mib: memory in MiB that CUDA reports, some 0.5% less than `nvidia-smi` shows.
      bandwidth: of the memory, in bytes/s.
      clock_ghz: maximum clock of a core.
      l2_mib: size of the L2 cache in MiB.
      shared_memory: bytes of shared memory that a block can have.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    memory_mib: int
    bandwidth: float
    clock_ghz: float
    l2_mib: float
    shared_memory: int = 232_448

    @property
    def usable_bytes(self) -> int:
        """Bytes that a run can use."""
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or _MEMORY_FRACTION)
        return int(fraction * self.memory_mib * _MIB)


# Sources: NVIDIA's data sheets (bandwidth), the CUDA programming guide's table of compute capabilities (shared memory),
# and for the rest what CUDA reports of each GPU, which OpenXLA records in xla/backends/gpu/target_config/specs.
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 81_158, 2.039e12, 1.41, 40, 166_912),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 81_008, 3.35e12, 1.98, 50),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 143_155, 4.8e12, 1.98, 50),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 182_642, 8e12, 1.965, 126.5),
    "gb200": Gpu("NVIDIA GB200", (10, 0), 152, 188_730, 8e12, 2.062, 129.25),
}


def gpu_options(topology: str, sizes: list[int]) -> dict[str, Any]:
    """Returns the arguments of `get_topology_desc` for `h100:8`, or for hosts with several GPUs as `h100:4x8`.

    The network between hosts is not told apart from NVLink. InputError for three dimensions, or without JAX's CUDA
    plugin.
    """
    name = topology.partition(":")[0]
    if len(sizes) > 2:
        raise InputError(f"--topology={topology}: expected GPUs, or hosts x GPUs of each: {name}:8 or {name}:4x8")
    cuda = next((cuda for cuda in (13, 12) if importlib.util.find_spec(f"jax_cuda{cuda}_plugin")), None)
    if cuda is None:
        raise InputError(f"--topology={topology} requires JAX's CUDA plugin; run: {install_hint('gpu-aot')}")
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # JAX's default, which shows warnings:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # of libraries that only a run needs, and of steps that do not fit
    shape = f"1x{sizes[0] if len(sizes) == 2 else 1}x{sizes[-1]}"
    return {"platform": "cuda", "topology": shape, "target_config": _describe(GPUS[name], cuda)}


def _describe(gpu: Gpu, cuda: int) -> str:
    """Returns the `GpuTargetConfigProto` of XLA in text format."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory + 1024}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {64 if gpu.capability == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth:.0f}
  l2_cache_size: {gpu.l2_mib * _MIB:.0f}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_mib * _MIB}
  shared_memory_per_block_optin: {gpu.shared_memory}
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: {cuda} }}
device_description_str: "{gpu.kind}"
"""
