"""`bert-jax pretrain --dry_run`: makes the checks of a run, and plans its sizes, work, memory, hours and checkpoints.

It compiles nothing, reads no shard of a dataset and writes nothing.
"""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh

from bert_jax.config_keys import PretrainConfig
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.model import parameter_count
from bert_jax.parallel.mesh import BATCH_AXES, abstract_mesh
from bert_jax.parallel.sharding import shard_bytes
from bert_jax.sections import checked
from bert_jax.tracking.throughput import device_kind, peak_flops, pretraining_work
from bert_jax.training.checkpoints import complete_steps
from bert_jax.training.initialization import fill_in_from_checkpoint, open_init
from bert_jax.training.objectives import objective_name
from bert_jax.training.phases import Phase, open_phases
from bert_jax.training.pretrain import plan_state
from bert_jax.training.run import claim_workdir, workdir_path
from bert_jax.training.train_step import check_memory


def plan_run(
    config: PretrainConfig, *, workdir: str | None = None, device: str | None = None, devices: int | None = None,
    mfu: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """Plans a pre-training, without starting it; returns the plan as JSON.

    Bytes of memory are those of one device. The hours are those of the steps that are left, on all devices, without
    compilation, evaluation and saves.

    Args:
      config: the run; see `configs/default.py`.
      workdir: the folder of the run. If it has a checkpoint, the run resumes from it; None if there is none yet.
      device: name of a device, see `device_kind`; None for those of this machine. With a name, JAX uses the CPU alone
        from then on in this process.
      devices: number of devices; by default those of this machine, or 1 of a named device.
      mfu: expected model FLOPs utilization, for the hours; by default the peak, which no run reaches.

    Raises InputError where the run would, before its first step.
    """
    checked("config", PretrainConfig, config)
    folder = None if workdir is None else workdir_path(workdir)
    if devices is not None and devices < 1:
        raise InputError(f"devices={devices}: expected at least 1")
    if not 0 < mfu <= 1:
        raise InputError(f"mfu={mfu}: expected a share above 0 and at most 1, such as 0.4")
    if device is None:
        kind, platform = jax.devices()[0].device_kind, jax.devices()[0].platform
        devices = devices or jax.device_count()
    else:
        kind, devices = device_kind(device), devices or 1
        platform = "tpu" if kind.startswith("TPU") else "gpu"
        jax.config.update("jax_platforms", "cpu")  # an accelerator of this machine stays free
    config = fill_in_from_checkpoint(config, folder)
    mesh = abstract_mesh(config.mesh, devices)
    loaded = open_phases(config, mesh, platform)
    if folder is not None and remote.exists(folder) and not folder.is_dir():
        raise InputError(f"workdir={folder}: is a file; expected a folder")
    before = None if folder is None else claim_workdir(folder, loaded)
    resumed = before.step if before else None
    model, first = loaded[0].model, loaded[0]
    if config.init and resumed is None:
        open_init(loaded)
    _, spec = plan_state(mesh, first.config, model, platform)
    state = spec.abstract
    if device is None:
        check_memory(state, jax.local_devices()[:devices])
    phases = [_describe(ready, mesh) for ready in loaded]
    gradients = jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), state.parameters, spec.gathered)
    parameters, optimizer = shard_bytes(state.parameters), shard_bytes(state.optimizer_state)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    keys = config.checkpoint
    peak, start = peak_flops(kind), resumed or 0
    coming = {*range(0, config.total_steps + 1, keys.every_steps), *(phase["last_step"] for phase in phases)} - {0}
    steps, milestones = {step for step in coming if step > start}, {*(before.milestones if before else ())}
    steps |= {int(found.name) for found in (complete_steps(folder) if folder and before else ())}
    milestones |= {step for step in steps | {*range(start, config.total_steps + 1)} if keys.is_milestone(step)}
    kept = len({*sorted(steps | milestones)[-keys.keep :], *milestones})
    left = sum(
        phase["model_flops_per_step"] * max(0, phase["last_step"] - max(start, phase["first_step"] - 1))
        for phase in phases
    )
    return {
        "parameters": parameter_count(model),
        "device": kind,
        "devices": devices,
        "mesh": dict(mesh.shape),
        "resumes_after_step": start,
        "total_steps": config.total_steps,
        "total_tokens": sum(phase["steps"] * phase["tokens_per_step"] for phase in phases),
        "total_model_flops": sum(phase["steps"] * phase["model_flops_per_step"] for phase in phases),
        "mfu": mfu,
        "remaining_hours": left / (peak * devices * mfu) / 3600 if peak else None,
        "phases": phases,
        "memory": {
            "parameter_bytes": parameters,
            "optimizer_bytes": optimizer,
            "sum_with_gradients_bytes": parameters + shard_bytes(gradients) + optimizer,
        },
        "checkpoints": {"bytes": size, "milestones": len(milestones), "kept": kept, "kept_bytes": kept * size},
    }


def _describe(phase: Phase, mesh: AbstractMesh) -> dict[str, Any]:
    """Describes the work of a phase."""
    config, loader = phase.config, phase.train_loader
    work = pretraining_work(config, phase.model, loader)
    rows, copies = config.global_batch_size, math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    before, after = loader.epochs(phase.start), loader.epochs(phase.stop)
    return {
        "first_step": phase.start + 1,
        "last_step": phase.stop,
        "steps": phase.stop - phase.start,
        "objective": objective_name(config),
        "seq_len": phase.seq_len,
        "global_batch_size": rows,
        "gradient_accumulation": config.gradient_accumulation,
        "rows_per_device": rows // config.gradient_accumulation // copies,
        "tokens_per_step": int(work.tokens),
        "real_token_share": loader.real_share,
        "model_flops_per_step": work.flops,
        "datasets": [
            {
                "path": str(source.dataset.folder), "examples": source.dataset.size("train"),
                "rows_per_epoch": source.size, "epochs": stop - start,
            }
            for source, start, stop in zip(loader.sources, before, after, strict=True)
        ],
    }  # fmt: skip
