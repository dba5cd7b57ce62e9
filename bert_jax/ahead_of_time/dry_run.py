"""`bert-jax pretrain --dry_run`: makes the checks of a run, and plans its sizes, work, memory, hours and checkpoints.

It compiles nothing, reads no shard of a dataset and writes nothing.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath
from jax.sharding import AbstractMesh

from bert_jax.ahead_of_time.chips import roofline
from bert_jax.config import ConfigDict, flatten
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.model import parameter_count
from bert_jax.parallel.mesh import BATCH_AXES, abstract_mesh, count_slices, describe_networks
from bert_jax.runtime.compilation_cache import check_folder
from bert_jax.runtime.saved_programs import SavedPrograms
from bert_jax.tracking.accelerators import Accelerator, find_accelerator, named_accelerator
from bert_jax.tracking.flops import recomputed_flops
from bert_jax.tracking.metrics import read_metrics
from bert_jax.tracking.throughput import pretraining_work
from bert_jax.training.checkpointing.checkpoints import check_place
from bert_jax.training.checkpointing.retention import plan_saves
from bert_jax.training.checks import compute_dtype
from bert_jax.training.initialization.checkpoint_values import fill_in_from_checkpoint
from bert_jax.training.initialization.warm_start import open_init
from bert_jax.training.phase_data import LoadedPhase, load_phase
from bert_jax.training.phases import open_phases
from bert_jax.training.planning.state_plan import check_memory
from bert_jax.training.pretrain import plan_state
from bert_jax.training.state import StateSpec
from bert_jax.training.workdir import claim_workdir

_HOUR = 3600.0
_MEASURED_ROWS = 10


def plan_run(
    config: ConfigDict,
    defaults: ConfigDict,
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
      defaults: the config that `changed` is the difference to.
      workdir: the folder of the run. If it has a checkpoint, the run resumes from it; None if there is none yet.
      device: name of a device, see `named_accelerator`; None for those of this machine.
      devices: number of devices; by default those of this machine, or 1 of a named device.
      slices: number of TPU slices, or GPU nodes, that the devices are in; by default those of this machine, or 1.
      mfu: expected model FLOPs utilization, for the hours.

    Raises InputError where the run would, before its first step.
    """
    if workdir == "":
        raise InputError("--workdir is empty; expected a folder, such as --workdir=runs/tiny")
    if devices is not None and devices < 1:
        raise InputError(f"--devices={devices}: expected at least 1")
    if slices is not None and slices < 1:
        raise InputError(f"--num_slices={slices}: expected at least 1")
    if mfu is not None and not 0 < mfu <= 1:
        raise InputError(f"--mfu={mfu}: expected a share above 0 and at most 1, such as 0.4")
    kind, platform, accelerator, devices, slices = _find_device(device, devices, slices)
    if devices % slices:
        raise InputError(f"--num_slices={slices}: {devices} devices are not divisible by it; set --devices={slices}")
    folder = None if workdir is None else remote.absolute(workdir)
    config = fill_in_from_checkpoint(config, folder)
    if device is None:
        check_folder(config.compilation_cache)
    if config.compiled:
        SavedPrograms.open(f"compiled={config.compiled}", config.compiled)
    requested = open_phases(config)
    mesh = abstract_mesh(config.mesh, devices)
    networks = describe_networks(mesh.shape, slices, platform)
    loaded = [load_phase(phase, mesh, platform) for phase in requested]
    resumed = None if folder is None else _start(folder, [ready.phase for ready in loaded])
    start = resumed or 0
    model, first = loaded[0].phase.model, loaded[0].phase
    if config.init and resumed is None:
        open_init(
            config.init, model, first.datasets[0],
            nsp=any(phase.config.objective.nsp for phase in requested), missing_heads=config.init_missing_heads,
        )  # fmt: skip
    spec = plan_state(mesh, first.config, model, platform)[1]
    if device is None:
        check_memory(spec.abstract, jax.local_devices()[:devices])
    memory = _memory(spec)
    phases = [_describe(ready, mesh) for ready in loaded]
    left = [max(0, phase["steps"][1] - max(start, phase["steps"][0] - 1)) for phase in phases]
    return {
        "parameters": parameter_count(model),
        "device": kind,
        "devices": devices,
        "num_slices": slices,
        "mesh": dict(mesh.shape),
        "networks": networks,
        "dtype": compute_dtype(config.dtype, platform).name,
        "resumes_after_step": start,
        "total_steps": config.total_steps,
        "total_tokens": sum(phase["tokens_per_step"] * phase["step_count"] for phase in phases),
        "total_model_flops": sum(phase["model_flops_per_step"] * phase["step_count"] for phase in phases),
        "phases": phases,
        "memory_bytes": memory,
        "hours": _hours(phases, left, accelerator, devices, memory, mfu, _measured(folder, phases)),
        "checkpoints": _checkpoints(config, phases, spec, resumed),
        "changed": _changed(config, defaults),
    }


def _find_device(
    name: str | None, count: int | None, slices: int | None
) -> tuple[str, str, Accelerator | None, int, int]:
    """Returns the kind of the device, its platform, its rates if known, and the number of devices and of slices."""
    if name is not None:
        kind, accelerator = named_accelerator(name)
        jax.config.update("jax_platforms", "cpu")  # an accelerator of this machine stays free
        return kind, "tpu" if kind.startswith("TPU") else "gpu", accelerator, count or slices or 1, slices or 1
    here = jax.devices()
    kind, platform = here[0].device_kind, here[0].platform
    slices = slices or (count_slices(here) if count is None else 1)
    return kind, platform, find_accelerator(kind), count or len(here), slices


def _start(folder: epath.Path, phases: Sequence[Any]) -> int | None:
    check_place(folder)
    if not remote.exists(folder):
        return None
    if not folder.is_dir():
        raise InputError(f"--workdir={folder}: is a file; expected a folder")
    return claim_workdir(folder, phases)


def _describe(loaded: LoadedPhase, mesh: AbstractMesh) -> dict[str, Any]:
    """Describes the work of a phase."""
    phase, config, loader = loaded.phase, loaded.phase.config, loaded.train_loader
    work = pretraining_work(config, phase.model, loader)(phase.start + 1)
    rows, copies = config.global_batch_size, math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    before, after = loader.epochs(phase.start), loader.epochs(phase.stop)
    return {
        "steps": [phase.start + 1, phase.stop],
        "step_count": phase.stop - phase.start,
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
        "recomputed_flops_per_step": rows
        * recomputed_flops(phase.model, phase.seq_len, config.remat, config.attention),
        "evaluations": -(-phase.stop // config.eval_every_steps) - phase.start // config.eval_every_steps
        if config.eval_every_steps
        else 1,
        "eval_batches": loaded.eval_loader.batches,
        "datasets": [
            {
                "path": str(source.dataset.folder), "examples": source.dataset.size("train"),
                "rows_per_epoch": source.size, "epochs": stop - start,
            }
            for source, start, stop in zip(loader.sources, before, after, strict=True)
        ],
    }  # fmt: skip


def _memory(spec: StateSpec) -> dict[str, int | None]:
    """Returns the bytes on a device: of parameters, gradients in float32, and the optimizer's state.

    Activations and temporaries depend on the compiler, and are None.
    """

    def on_device(tree: Any) -> int:
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
        )

    parameters = on_device(spec.abstract.parameters)
    optimizer = on_device(spec.abstract.optimizer_state)
    return {"parameters": parameters, "gradients": parameters, "optimizer": optimizer, "activations": None}


def _measured(folder: epath.Path | None, phases: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the rates of the newest rows of a workdir's metrics, None without any.

    `flops_per_second` are model FLOPs on all devices of that run, and `mfu` is None if its device is unknown.
    """
    rows = [] if folder is None or not remote.exists(folder) else read_metrics(folder)
    rows = [row for row in rows if row.get("tokens_per_second")][-_MEASURED_ROWS:]
    if not rows:
        return None
    phase = next((phase for phase in phases if rows[-1]["step"] <= phase["steps"][1]), phases[-1])
    rows = [row for row in rows if row["step"] >= phase["steps"][0]] or rows[-1:]
    rate = sum(row["tokens_per_second"] for row in rows) / len(rows)
    shares = [row["mfu"] for row in rows if row.get("mfu")]
    return {
        "steps": [rows[0]["step"], rows[-1]["step"]],
        "tokens_per_second": rate,
        "flops_per_second": rate / phase["tokens_per_step"] * phase["model_flops_per_step"],
        "mfu": sum(shares) / len(shares) if shares else None,
    }


def _hours(
    phases: Sequence[dict[str, Any]], left: Sequence[int], accelerator: Accelerator | None, devices: int,
    memory: dict[str, int | None], mfu: float | None, measured: dict[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the hours of the steps that are left, by where the estimate comes from; None where it is unknown.

    `roofline` is a lower bound: the largest of matrix products at the device's peak, and of one read and one write of
    the state per step. The latter is skipped for a device whose memory bandwidth is unknown.
    """
    flops = sum(phase["model_flops_per_step"] * steps for phase, steps in zip(phases, left, strict=True))
    hours: dict[str, Any] = dict.fromkeys(("roofline", "given_mfu", "measured_mfu", "measured_rate"))
    if accelerator:
        state = 2 * sum(memory[part] or 0 for part in ("parameters", "optimizer"))
        seconds = 0.0
        for phase, steps in zip(phases, left, strict=True):
            work = (phase["model_flops_per_step"] + phase["recomputed_flops_per_step"]) / devices
            seconds += steps * roofline(accelerator, flops=work, memory_bytes=state, collectives=None).at_least
        hours["roofline"] = seconds / _HOUR
        peak = accelerator.peak_flops * devices
        if mfu:
            hours["given_mfu"] = flops / (peak * mfu) / _HOUR
        if measured and measured["mfu"]:
            hours["measured_mfu"] = flops / (peak * measured["mfu"]) / _HOUR
    if measured:
        hours["measured_rate"] = flops / measured["flops_per_second"] / _HOUR
    return {**hours, "mfu": mfu, "measured": measured}


def _checkpoints(
    config: ConfigDict, phases: Sequence[dict[str, Any]], spec: StateSpec, resumed: int | None
) -> dict[str, Any]:  # fmt: skip
    """Returns the size of a checkpoint, the number of saves that are left, and the disk that the kept ones take."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec.abstract))
    plan = plan_saves(config, [phase["steps"][1] for phase in phases], resumed)
    return {
        "bytes": size, "saves": plan.saves, "kept": plan.kept, "milestones": plan.milestones,
        "kept_bytes": plan.kept * size, "every_steps": config.checkpoint.every_steps,
    }  # fmt: skip


def _changed(config: ConfigDict, defaults: ConfigDict) -> list[dict[str, Any]]:
    before = dict(flatten(defaults))
    return [
        {"key": key, "value": value, "default": before[key]}
        for key, value in flatten(config) if value != before[key]
    ]  # fmt: skip
