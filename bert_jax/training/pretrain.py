"""The pre-training loop, from a config to checkpoints and curves, read from top to bottom.

bert-jax pretrain --config=bert_tiny --workdir=runs/tiny --config.data.path=DATASET
"""

import json
import logging
from contextlib import ExitStack
from typing import Any

import jax
from etils import epath

from bert_jax.config import ConfigDict
from bert_jax.data.loader import EvalLoader, Prefetch, TrainLoader
from bert_jax.data.masking import Masking
from bert_jax.errors import BertJaxError, Interrupted
from bert_jax.model import parameter_count
from bert_jax.progress import Bars, silent
from bert_jax.training.checkpoints import Checkpointer
from bert_jax.training.checks import bert_config, check_config, claim_workdir, compute_dtype, open_dataset
from bert_jax.training.evaluation import Evaluator
from bert_jax.training.metrics import MetricsWriter
from bert_jax.training.optimizer import learning_rate_schedule, make_optimizer
from bert_jax.training.sharding import check_divisibility, make_mesh
from bert_jax.training.state import describe_state
from bert_jax.training.stopping import StopSignal
from bert_jax.training.throughput import Throughput, summary
from bert_jax.training.train_step import make_eval_step, make_train_step, put_batch

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"


def pretrain(
    config: ConfigDict, workdir: str, *, stop: StopSignal | None = None, bars: Bars = silent
) -> dict[str, float]:
    """Trains as `config` says in `workdir`, going on from its newest checkpoint where there is one.

    Returns the last evaluation, or nothing where the dataset has no eval split or the run was finished before.

    Args:
      config: the run; see `configs/default.py`.
      workdir: where checkpoints and metrics go.
      stop: a `StopSignal` that is active already; by default one is for as long as this runs.
      bars: how progress is shown.

    Raises:
      InputError: the config, the dataset and the devices do not fit each other, or the workdir holds another run.
      Interrupted: SIGTERM or SIGINT came; the state is saved.
      BertJaxError: too many steps in a row were not finite; the state is saved.
    """
    with ExitStack() as stack:
        return _pretrain(config, workdir, stop or stack.enter_context(StopSignal()), bars, stack)


def _pretrain(config: ConfigDict, workdir: str, stop: StopSignal, bars: Bars, stack: ExitStack) -> dict[str, float]:
    # --- Checks, before any work ---------------------------------------------------------------------------------
    folder = epath.Path(workdir).resolve()
    check_config(config)
    dataset = open_dataset(config)
    model = bert_config(config, dataset)
    mesh = make_mesh(config.mesh)
    check_divisibility(mesh, model, config.global_batch_size, config.gradient_accumulation)
    if claim_workdir(folder, config, dataset) == config.total_steps:
        log.info("%s is finished: it is at step %d of %d", folder, config.total_steps, config.total_steps)
        return {}

    # --- Data ----------------------------------------------------------------------------------------------------
    masking = Masking(
        config.data.max_predictions,
        mask_rate=config.objective.mask_rate,
        mask_token=config.objective.mask_token,
        keep_token=config.objective.keep_token,
        random_token=config.objective.random_token,
    )
    train_loader = TrainLoader(dataset, seed=config.seed, global_batch_size=config.global_batch_size, masking=masking)
    microbatches = config.gradient_accumulation
    eval_loader = EvalLoader(
        dataset, batch_size=config.global_batch_size // microbatches, batches=config.eval_batches * microbatches
    )
    if not eval_loader.batches:
        log.warning("%s has no eval split (or eval_batches=0): there will be no evaluation", dataset.folder)

    # --- Model, optimizer, step ----------------------------------------------------------------------------------
    dtype = compute_dtype(config.dtype)
    optimizer = make_optimizer(config.optimizer)
    schedule = learning_rate_schedule(config.optimizer.learning_rate, config.optimizer.warmup_steps, config.total_steps)
    spec = describe_state(
        mesh, model, optimizer, config.seed, dtype=dtype, remat=config.remat, scan_layers=config.scan_layers
    )
    train_step = make_train_step(mesh, spec, optimizer, schedule, seed=config.seed, nsp=config.objective.nsp)
    eval_step = make_eval_step(mesh, spec.graph, spec.shardings.parameters)
    evaluator = Evaluator(mesh, eval_step, eval_loader, dataset.token_counts(), nsp=config.objective.nsp)

    # --- Start: 1. go on from the newest checkpoint, 2. or from scratch ---------------------------------------------
    checkpointer = Checkpointer(
        folder, keep=config.checkpoint.keep, bert_config=model, config=config, dataset=dataset.info,
        tokenizer=dataset.tokenizer,
    )  # fmt: skip
    stack.callback(checkpointer.close)
    start = checkpointer.latest_step() or 0
    state = checkpointer.restore(start, spec.abstract) if start else spec.make()
    if start:
        log.info("going on from step %d", start)
    (folder / CONFIG_FILE).write_text(json.dumps(json.loads(config.to_json_best_effort()), indent=2) + "\n")
    writer = MetricsWriter(folder, resume_step=start)
    stack.callback(writer.close)
    log.info(
        "%s parameters, %s training instances, %s of %d %s",
        f"{parameter_count(model):,}", f"{train_loader.size:,}", dict(mesh.shape), jax.device_count(),
        jax.devices()[0].device_kind,
    )  # fmt: skip
    if stop.received:
        raise Interrupted(f"{stop.received.name}: before step {start + 1}; the same command goes on from there")

    # --- Loop ----------------------------------------------------------------------------------------------------
    batches = Prefetch(lambda step: put_batch(mesh, train_loader.batch(step), microbatches), start, config.total_steps)
    stack.callback(batches.close)
    bar = bars(total=config.total_steps, initial=start, desc="pretrain", unit="step")
    stack.callback(bar.close)
    bar.set_postfix_str("compiling")
    throughput = Throughput(config, model, dataset.info.seq_len)
    evaluation: dict[str, float] = {}
    pending: Any = None  # the metrics of the step before: read while the device works on this one

    def settle() -> bool:
        """Reads the metrics of the pending step and logs them. True where too many in a row were not finite."""
        nonlocal pending
        if pending is None:
            return False
        (at, device_values), pending = pending, None
        values = jax.device_get(device_values)
        throughput.finished(at)
        if at % config.log_every_steps == 0 or at == config.total_steps:
            row = {name: value.item() for name, value in values.items()} | throughput.rates(at)
            writer.write(at, row)
            bar.set_postfix_str(summary(row))
            checkpointer.check()
        bar.update(1)
        return bool(values["nonfinite_streak"] >= config.max_nonfinite_steps)

    def evaluate(at: int) -> dict[str, float]:
        eval_bar = bars(total=eval_loader.batches, desc="evaluate", unit="batch", leave=False)
        values = evaluator.run(state.parameters, on_batch=lambda: eval_bar.update(1))
        eval_bar.close()
        writer.write(at, values, split="eval")
        log.info("step %d: eval %s; unigram baseline %.2f", at, summary(values), values["unigram_loss"])
        throughput.pause()
        return values

    with jax.set_mesh(mesh), jax.transfer_guard("disallow"):
        for step, batch in enumerate(batches, start + 1):
            state, metrics = train_step(state, batch)
            is_hopeless = settle()
            pending = step, metrics
            is_last, received = step == config.total_steps, stop.received
            is_eval = is_last or (config.eval_every_steps and step % config.eval_every_steps == 0)
            is_save = is_last or is_hopeless or received or step % config.checkpoint.every_steps == 0
            if is_eval or is_save:  # a step's row is written before the step is saved, or a kill could lose it
                is_hopeless = settle() or is_hopeless
            if is_eval and eval_loader.batches:
                evaluation = evaluate(step)
            if is_save:
                checkpointer.save(step, state)
            if is_hopeless or received:
                checkpointer.wait()
            if is_hopeless:
                raise BertJaxError(
                    f"loss, gradient or update were not finite {config.max_nonfinite_steps} times in a row, up to step "
                    f"{step}, which is saved: lower optimizer.learning_rate or raise optimizer.warmup_steps"
                )
            if received:
                raise Interrupted(f"{received.name}: saved step {step}; the same command goes on from there")
        checkpointer.wait()
    return evaluation
