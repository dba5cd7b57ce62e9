"""`bert-jax pretrain --dry_run`: makes the checks of a run, and plans its sizes, work, memory, hours and checkpoints.

It compiles nothing, reads no shard of a dataset and writes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import jax
from jax.sharding import AbstractMesh

from bert_jax.ahead_of_time.chips import roofline
from bert_jax.config_keys import PretrainConfig
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.model import parameter_count
from bert_jax.parallel.mesh import BATCH_AXES, abstract_mesh, count_slices, describe_networks
from bert_jax.sections import flatten
from bert_jax.tracking.flops import Accelerator, find_accelerator, named_accelerator, recomputed_flops
from bert_jax.tracking.throughput import pretraining_work
from bert_jax.training.checkpoint_values import fill_in_from_checkpoint
from bert_jax.training.checkpointer import plan_saves
from bert_jax.training.checks import compute_dtype
from bert_jax.training.phases import LoadedPhase, load_phase, open_phases
from bert_jax.training.pretrain import plan_state
from bert_jax.training.run import claim_workdir
from bert_jax.training.state import check_memory
from bert_jax.training.warm_start import open_init

_HOUR = 3600.0


def plan_run(
    config: PretrainConfig,
    *,
    workdir: str | None = None,
    device: str | None = None,
    devices: int | None = None,
    slices: int | None = None,
    mfu: float | None = None,
) -> dict[str, Any]:
    """Plans a pre-training, without starting it; returns the plan as JSON.

    Bytes of memory are those of one device. The hours are those of the steps that are left, on all devices, without
    compilation, evaluation and saves.

    Args:
      config: the run; see `configs/default.py`.
      workdir: the folder of the run. If it has a checkpoint, the run resumes from it; None if there is none yet.
      device: name of a device, see `named_accelerator`; None for those of this machine.
      devices: number of devices; by default those of this machine, or 1 of a named device.
      slices: number of TPU slices, or GPU nodes, that the devices are in; by default those of this machine, or 1.
      mfu: expected model FLOPs utilization, for the hours.

    Raises InputError where the run would, before its first step.
    """
    if workdir == "":
        raise InputError("--workdir is empty; expected a folder, such as --workdir=runs/tiny")
    for option, count in (("--devices", devices), ("--num_slices", slices)):
        if count is not None and count < 1:
            raise InputError(f"{option}={count}: expected at least 1")
    if mfu is not None and not 0 < mfu <= 1:
        raise InputError(f"--mfu={mfu}: expected a share above 0 and at most 1, such as 0.4")
    kind, platform, devices, slices = _find_devices(device, devices, slices)
    if devices % slices:
        raise InputError(f"--num_slices={slices}: {devices} devices are not divisible by it; set --devices={slices}")
    folder = None if workdir is None else remote.absolute(workdir)
    config = fill_in_from_checkpoint(config, folder)
    requested = open_phases(config)
    mesh = abstract_mesh(config.mesh, devices)
    networks = describe_networks(mesh.shape, slices, platform)
    loaded = [load_phase(phase, mesh, platform) for phase in requested]
    if folder is not None and remote.exists(folder) and not folder.is_dir():
        raise InputError(f"--workdir={folder}: is a file; expected a folder")
    resumed = None if folder is None else claim_workdir(folder, [ready.phase for ready in loaded])
    model, first = loaded[0].phase.model, loaded[0].phase
    if config.init and resumed is None:
        open_init(
            config.init, model, first.datasets[0],
            nsp=any(phase.config.objective.nsp for phase in requested), missing_heads=config.init_missing_heads,
        )  # fmt: skip
    state = plan_state(mesh, first.config, model, platform)[1].abstract
    if device is None:
        check_memory(state, jax.local_devices()[:devices])
    phases = [_describe(ready, mesh) for ready in loaded]
    parameters, optimizer = (
        sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
        for part in (state.parameters, state.optimizer_state)
    )
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    saves = plan_saves(config, [phase["steps"][1] for phase in phases], resumed)
    before = dict(flatten(PretrainConfig()))
    return {
        "parameters": parameter_count(model),
        "device": kind,
        "devices": devices,
        "num_slices": slices,
        "mesh": dict(mesh.shape),
        "dtype": compute_dtype(config.dtype, platform).name,
        "resumes_after_step": resumed or 0,
        "total_steps": config.total_steps,
        **_work(phases, resumed or 0, find_accelerator(kind), devices, 2 * (parameters + optimizer), mfu),
        "networks": networks,
        "phases": phases,
        "memory_bytes": {
            "parameters": parameters,
            "gradients": parameters,
            "optimizer": optimizer,
            "sum_without_activations": 2 * parameters + optimizer,
        },
        "checkpoints": {"bytes": size, **asdict(saves), "kept_bytes": saves.kept * size},
        "changed": [
            {"key": key, "value": value, "default": before[key]}
            for key, value in flatten(config)
            if value != before[key]
        ],
    }


def _find_devices(name: str | None, count: int | None, slices: int | None) -> tuple[str, str, int, int]:
    """Returns kind and platform of the devices, and the numbers of devices and of slices."""
    if name is None:
        here = jax.devices()
        slices = slices or (count_slices(here) if count is None else 1)
        return here[0].device_kind, here[0].platform, count or len(here), slices
    kind = named_accelerator(name)[0]
    jax.config.update("jax_platforms", "cpu")  # an accelerator of this machine stays free
    return kind, "tpu" if kind.startswith("TPU") else "gpu", count or slices or 1, slices or 1


def _work(
    phases: Sequence[dict[str, Any]], start: int, accelerator: Accelerator | None, devices: int, moved_bytes: int,
    mfu: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Returns tokens and FLOPs of the run, and the hours of the steps after `start`; None for an unknown device.

    `at_least` is a lower bound: products at the peak, or `moved_bytes` of state read and written by each step.
    """
    tokens, flops, flops_left, seconds = 0, 0.0, 0.0, 0.0
    for phase in phases:
        steps = phase["steps"][1] - phase["steps"][0] + 1
        left = min(steps, max(0, phase["steps"][1] - start))
        tokens += steps * phase["tokens_per_step"]
        flops += steps * phase["model_flops_per_step"]
        flops_left += left * phase["model_flops_per_step"]
        if accelerator:
            work = (phase["model_flops_per_step"] + phase["recomputed_flops_per_step"]) / devices
            seconds += left * roofline(accelerator, flops=work, memory_bytes=moved_bytes)["at_least_seconds"]
    hours: dict[str, Any] = {}
    if accelerator:
        expected = flops_left / (accelerator.peak_flops * devices * mfu) / _HOUR if mfu else None
        hours = {"at_least": seconds / _HOUR, "expected": expected}
    return {"total_tokens": tokens, "total_model_flops": flops, "hours": hours or None}


def _describe(loaded: LoadedPhase, mesh: AbstractMesh) -> dict[str, Any]:
    """Describes the work of a phase."""
    phase, config, loader = loaded.phase, loaded.phase.config, loaded.train_loader
    work = pretraining_work(config, phase.model, loader)
    rows, copies = config.global_batch_size, math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    recomputed = recomputed_flops(phase.model, phase.seq_len, config.remat, config.attention)
    before, after = loader.epochs(phase.start), loader.epochs(phase.stop)
    return {
        "steps": [phase.start + 1, phase.stop],
        "seq_len": phase.seq_len,
        "global_batch_size": rows,
        "gradient_accumulation": config.gradient_accumulation,
        "rows_per_device": rows // config.gradient_accumulation // copies,
        "predictions_per_row": loader.sources[0].predictions,
        "learning_rate": config.optimizer.learning_rate,
        "warmup_steps": config.optimizer.warmup_steps,
        "tokens_per_step": int(work.tokens),
        "real_token_share": loader.real_share,
        "model_flops_per_step": work.flops,
        "recomputed_flops_per_step": rows * recomputed,
        "eval_batches": loaded.eval_loader.batches,
        "datasets": [
            {
                "path": str(source.dataset.folder), "examples": source.dataset.size("train"),
                "rows_per_epoch": source.size, "epochs": stop - start,
            }
            for source, start, stop in zip(loader.sources, before, after, strict=True)
        ],
    }  # fmt: skip
