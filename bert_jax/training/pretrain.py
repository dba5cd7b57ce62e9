"""Pre-training from a config to checkpoints and metrics: checks, state, and phases in order.

`bert-jax pretrain --config=bert_tiny --workdir=runs/tiny --config.data.path=DATASET` calls `pretrain` here.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import jax
from jax.sharding import Mesh

from bert_jax.config import ConfigDict
from bert_jax.data.unknown_tokens import MAX_SHARE, unknown_share, warn_of_share
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.model import parameter_count
from bert_jax.parallel.mesh import check_divisibility, fill_in_accumulation, make_mesh
from bert_jax.progress import Bars, silent
from bert_jax.runtime.preemption import StopSignal
from bert_jax.training.checkpointing.checkpoints import Checkpointer
from bert_jax.training.checks import check_attention
from bert_jax.training.optimizer import warn_of_uncorrected_lamb
from bert_jax.training.phases import Phase, open_phases
from bert_jax.training.pretrain_phase import make_loaders, plan_state, train_phase
from bert_jax.training.run import open_run
from bert_jax.training.warm_start import initialize_from, open_init
from bert_jax.training.workdir import claim_workdir, enter_workdir

log = logging.getLogger(__name__)


def pretrain(
    config: ConfigDict, workdir: str, *, stop: StopSignal | None = None, bars: Bars = silent
) -> dict[str, float]:
    """Runs the pre-training of `config` in `workdir`, and resumes from its newest checkpoint if there is one.

    Returns the last evaluation; empty if the dataset has no eval split or the run was finished before.

    Args:
      config: the run; see `configs/default.py`.
      workdir: folder for checkpoints and metrics.
      stop: a `StopSignal` that is already active; by default one is active during this call.
      bars: shows progress.

    Raises:
      InputError: config, dataset and devices do not match, or the workdir holds another run or is in use.
      Interrupted: SIGTERM or SIGINT was received; the state is saved.
      BertJaxError: too many non-finite steps in a row; the state is saved.
    """
    with ExitStack() as stack:
        return _pretrain(config, workdir, stop or stack.enter_context(StopSignal()), bars, stack)


def fit_phases(phases: Sequence[Phase], mesh: Mesh) -> list[Phase]:
    """Infers the microbatches of each phase. Raises InputError for one that does not match the mesh or its data."""
    fitted = [replace(phase, config=fill_in_accumulation(mesh, phase.config)) for phase in phases]
    for phase in fitted:
        check_divisibility(mesh, phase.model, phase.config.global_batch_size, phase.config.gradient_accumulation)
        check_attention(phase.config, phase.model, phase.seq_len, mesh)
        make_loaders(phase)
    return fitted


def _pretrain(config: ConfigDict, workdir: str, stop: StopSignal, bars: Bars, stack: ExitStack) -> dict[str, float]:
    # --- Checks, before any work ---------------------------------------------------------------------------------
    if not workdir:
        raise InputError("--workdir is empty; expected a folder, such as --workdir=runs/tiny")
    folder = remote.absolute(workdir)
    requested = open_phases(config)
    warn_of_uncorrected_lamb(phase.config.optimizer for phase in requested)
    for dataset in dict.fromkeys(dataset for phase in requested for dataset in phase.datasets):
        share = unknown_share(dataset.token_counts(), dataset.tokenizer.unk_id)
        warn_of_share(share, dataset.tokenizer, above=MAX_SHARE, where=str(dataset.folder))
    mesh = make_mesh(config.mesh)
    phases = fit_phases(requested, mesh)
    for phase, before in zip(phases, requested, strict=True):
        if phase.config is not before.config:
            microbatches = phase.config.gradient_accumulation
            log.info("Steps %d-%d: inferred gradient_accumulation=%d", phase.start + 1, phase.stop, microbatches)
    watch = enter_workdir(folder, config, stack)
    start = claim_workdir(folder, requested)
    if start == config.total_steps:
        log.info("%s is finished: step %d of %d", folder, config.total_steps, config.total_steps)
        return {}
    init = None
    if config.init and not start:
        first = phases[0]
        init = open_init(config.init, first.model, first.datasets[0], missing_heads=config.init_missing_heads)

    # --- State: 1. from the newest checkpoint, 2. from another run's parameters, 3. from scratch ----------------------
    tokenizer = phases[0].datasets[0].tokenizer
    checkpointer = Checkpointer(folder, keep=config.checkpoint.keep, config=config, tokenizer=tokenizer)
    stack.callback(checkpointer.close)
    _, spec = plan_state(mesh, phases[0].config, phases[0].model)
    if start:
        start, state = checkpointer.restore(start, spec.abstract)
        log.info("Resuming from step %d", start)
    elif init:
        state = initialize_from(init, spec)
    else:
        state = spec.make()
    log.info(
        "Model has %s parameters; mesh is %s on %d %s",
        f"{parameter_count(phases[0].model):,}", dict(mesh.shape), jax.device_count(), jax.devices()[0].device_kind,
    )  # fmt: skip
    run = open_run(
        folder, config, mesh, checkpointer, stop, watch, bars, stack,
        start=start, total=config.total_steps, name="pretrain",
    )  # fmt: skip

    # --- Phases, in order ----------------------------------------------------------------------------------------
    evaluation: dict[str, float] = {}
    for phase in phases:
        if start < phase.stop:
            state, evaluation = train_phase(run, phase, state, max(start, phase.start))
    checkpointer.wait()
    return evaluation
