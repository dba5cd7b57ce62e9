"""`bert-jax inspect --workdir RUN --step N`: the batch that a step of a run trains on, and its losses."""

from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import PartitionSpec

from bert_jax.batch import Batch, HostBatch, map_arrays
from bert_jax.config_keys import MeshKeys, PretrainConfig
from bert_jax.data.report import describe_sequence, render_sequence
from bert_jax.errors import InputError
from bert_jax.files import provenance, remote
from bert_jax.files.atomic import read_json
from bert_jax.model import abstract_parameters
from bert_jax.parallel.mesh import abstract_mesh, batch_mesh_axes, make_mesh, put_batch
from bert_jax.parallel.sharding import make_forward_step, parameter_shardings
from bert_jax.sections import from_mapping
from bert_jax.tracking.throughput import key_values
from bert_jax.training.checkpoints import Checkpoint, complete_steps, read_checkpoint
from bert_jax.training.initialization import repeat_positions
from bert_jax.training.objectives import LOGITS_BYTES, make_objective, weighted_cross_entropy
from bert_jax.training.phases import Phase, open_phases
from bert_jax.training.run import CONFIG_FILE, claim_workdir, workdir_path
from bert_jax.training.train_step import compute_dtype

MOST_ROWS = 64
"""Rows that a device computes at a time."""


def inspect_step(workdir: str, step: int, *, samples: int = 3) -> dict[str, Any]:
    """Returns the report on the batch of a step, as JSON: its losses, and examples with the loss of each prediction.

    The losses, in nats, are those of the newest kept checkpoint before the step, without dropout; without a checkpoint
    there are none.

    Args:
      workdir: a workdir of pre-training.
      step: the step, from 1; it need not have been trained yet.
      samples: the number of examples: those of the highest losses, or the first without losses.

    Raises:
      InputError: the workdir or its datasets were not found, are damaged or changed; or the run has no such step.
    """
    folder = workdir_path(workdir)
    if not remote.exists(folder / CONFIG_FILE) or "objective" not in (keys := read_json(folder / CONFIG_FILE)):
        raise InputError(f"workdir={folder}: expected a workdir of `bert-jax pretrain`, with its {CONFIG_FILE}")
    config, devices = from_mapping(PretrainConfig, keys), read_json(folder / provenance.FILE)["runs"][-1]["devices"]
    phases = open_phases(config, abstract_mesh(config.mesh, devices["count"]), devices["platform"])
    claim_workdir(folder, phases)  # refuses other datasets
    if not 1 <= step <= config.total_steps:
        raise InputError(f"step={step}: must be in 1 to total_steps={config.total_steps}")
    phase = next(phase for phase in phases if step <= phase.stop)
    loader, objective = phase.train_loader, make_objective(phase.config)
    batch: dict[str, Any] = {**loader.batch(step - 1)}
    present = batch["sequence_ids"].max(axis=1)
    examples = [(row, number) for row, last in enumerate(present.tolist()) for number in range(1, last + 1)]
    lm = phase.config.objective.lm
    report = {
        "workdir": str(folder), "step": step, "total_steps": config.total_steps, "rows": len(present),
        "microbatches": phase.config.gradient_accumulation, "seq_len": phase.seq_len, "examples": len(examples),
        "parameters_of_step": None,
    }  # fmt: skip
    losses: dict[str, np.ndarray] = {}  # of the sequences, [B, K]
    if before := next((found for found in complete_steps(folder) if int(found.name) < step), None):
        counts = objective.denominators(cast(Batch[Any], batch))
        batch |= _compute_losses(read_checkpoint(before), cast(HostBatch, batch), phase)
        means = {name: float(batch[name].sum() / max(1, count)) for name, count in counts.items()}
        report |= {"parameters_of_step": int(before.name), "loss": objective.loss(means), **means}
        name = f"{lm}_loss"
        losses = {**batch, name: _mean_by_sequence(batch, batch[name])}
        losses = {"loss": objective.loss(losses), **{name: losses[name] for name in objective.weights}}
        examples.sort(key=lambda example: -losses["loss"][example[0], example[1] - 1])
    shown = []
    for place, number in examples[:samples]:
        source_of, numbers = loader.row_numbers(step - 1, np.array([place]))
        source = loader.sources[source_of[0]]
        instances, epochs = source.instances(numbers)
        row = {name: array[place] for name, array in batch.items()}
        shown.append({
            "row": place, "sequence": number, "data": str(source.dataset.folder), "epoch": int(epochs[0]),
            "instance": int(instances[0, number - 1]),
            **{name: float(values[place, number - 1]) for name, values in losses.items()},
            **describe_sequence(source.dataset.tokenizer, row, number, left_to_right=lm == "ltr"),
        })  # fmt: skip
    return {**report, "samples": shown}


def _compute_losses(checkpoint: Checkpoint, batch: HostBatch, phase: Phase) -> dict[str, np.ndarray]:
    """Computes the terms of the objective's sums: [B, P] of the language model, [B, K] of NSP if there is its head.

    `best_ids` [B, P] are the most probable tokens. The model runs as in `phase`, that of the step.
    """
    lm, mesh, model = phase.config.objective.lm, make_mesh(MeshKeys()), phase.model
    graph, _, info = abstract_parameters(model, dtype=compute_dtype(phase.config.dtype))
    shardings = parameter_shardings(mesh, info)

    def losses(model: Any, rows: Batch[jax.Array]) -> dict[str, jax.Array]:
        logits, nsp = model(rows)
        each, found = jax.vmap(jax.vmap(weighted_cross_entropy)), {"best_ids": logits.argmax(axis=-1)}
        found[f"{lm}_loss"], found[f"{lm}_accuracy"] = each(logits, rows["masked_ids"], rows["masked_weights"])
        if nsp is not None:
            labels, weights = rows["next_sentence_labels"], rows["next_sentence_weights"]
            found["nsp_loss"], found["nsp_accuracy"] = each(nsp, labels, weights)
        return found

    forward = make_forward_step(mesh, graph, shardings, losses, PartitionSpec(batch_mesh_axes(mesh)))
    # With all heads (None): the step may begin to train one that the checkpoint does not list.
    parameters, (count, predictions) = checkpoint.load_parameters(shardings, heads=None), batch["masked_ids"].shape
    most = max(1, min(MOST_ROWS, LOGITS_BYTES // (4 * predictions * model.padded_vocab_size)))
    if phase.repeated and checkpoint.step <= phase.start:  # as the phase begins
        parameters = repeat_positions(parameters, phase.repeated)
    parts = []
    for rows in np.split(np.arange(count), range(most * mesh.size, count, most * mesh.size)):
        rows = np.resize(rows, -(-len(rows) // mesh.size) * mesh.size)
        parts.append(jax.device_get(forward(parameters, put_batch(mesh, map_arrays(lambda x: x[rows], batch)))))  # noqa: B023
    return {name: np.concatenate([part[name] for part in parts])[:count] for name in parts[0]}


def _mean_by_sequence(batch: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    """Returns the mean of values [B, P], those of predictions, in each sequence: [B, K]; 0 for one without any."""
    number = np.take_along_axis(batch["sequence_ids"], batch["masked_positions"], axis=1)[..., None]
    is_inside = (number == np.arange(batch["cls_positions"].shape[1]) + 1) * batch["masked_weights"][..., None]
    return (values[..., None] * is_inside).sum(axis=1) / np.maximum(1, is_inside.sum(axis=1))


def render_step(report: Mapping[str, Any]) -> list[str]:
    """Formats the report of `inspect_step` as lines for a terminal."""
    of_step = report["parameters_of_step"]
    means = key_values({name: value for name, value in report.items() if name.endswith(("loss", "accuracy"))})
    lines = [
        f"{report['workdir']}: step {report['step']} of {report['total_steps']}: {report['examples']} examples in "
        f"{report['rows']} rows of {report['seq_len']} tokens, in {report['microbatches']} microbatches",
        "No losses: no checkpoint before the step is kept" if of_step is None
        else f"With the parameters of step {of_step}, without dropout: {means}",
    ]  # fmt: skip
    for sample in report["samples"]:
        losses = key_values({name: value for name, value in sample.items() if name.endswith("loss")})
        place = f"row {sample['row']}, sequence {sample['sequence']}, epoch {sample['epoch']}, instance"
        lines += ["", f"{place} {sample['instance']} of {sample['data']} {losses}", render_sequence(sample)]
        for made in sample["predictions"]:
            values = f"{made['loss']:>8.3f}  {made['best']}" if losses else ""
            lines.append(f"{made['position']:>6}  {made['target']:<20}{made['input']:<20}{values}".rstrip())
    return lines
