"""Training steps from a file of compiled programs, or compiled here if the file has none that fits."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.config import ConfigDict, flatten
from bert_jax.model import BertConfig
from bert_jax.parallel.step_program import TrainStep
from bert_jax.runtime.processes import any_process
from bert_jax.runtime.saved_programs import SavedPrograms, without_source_lines
from bert_jax.training.phase_data import LoadedPhase
from bert_jax.training.state import StateSpec

log = logging.getLogger(__name__)

PROGRAM_KEYS = (
    "dtype", "attention", "remat", "scan_layers", "gradient_reduce_dtype", "objective.lm", "objective.nsp",
    "mesh.zero1", "optimizer.",
)  # fmt: skip
"""Config keys that the training step is made from, beside those of the model, the mesh and the batch."""
_ARGUMENTS = (
    "optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.warmup_proportion", "optimizer.restart_schedule",
)  # fmt: skip


def run_saved_program(
    saved: SavedPrograms, mesh: Mesh, loaded: LoadedPhase, spec: StateSpec, train_step: TrainStep
) -> None:
    """Makes a phase's step run the program in `saved`, in all processes, or else compiles it and logs the reason."""
    phase, batch = loaded.phase, loaded.abstract_batch(mesh)
    with jax.set_mesh(mesh), without_source_lines():
        lowered = train_step.lower(spec.abstract, batch)
    settings = program_settings(mesh, phase.config, phase.model, batch)
    compiled, reason = saved.load(lowered, list(mesh.devices.flat), settings)
    if any_process(compiled is None):
        log.warning(
            "%s is not used for steps %d-%d, which are compiled: %s", saved.key, phase.start + 1, phase.stop,
            reason or "another process could not load it",
        )  # fmt: skip
        with jax.set_mesh(mesh):
            compiled = lowered.compile()
    else:
        log.info("Steps %d-%d run the program of %s", phase.start + 1, phase.stop, saved.key)
    assert compiled is not None
    train_step.run_with(compiled, batch)


def program_settings(mesh: Mesh, config: ConfigDict, model: BertConfig, batch: Batch[Any]) -> dict[str, Any]:
    """Returns by name what a phase's step is made from: sizes of model, mesh and batch, and keys of the config."""
    entries: Mapping[str, Any] = batch
    return {
        **{f"mesh.{axis}": size for axis, size in mesh.shape.items()},
        **{f"model.{name}": value for name, value in model.to_dict().items()},
        **{f"batch.{name}": list(entry.shape) for name, entry in entries.items()},
        **program_keys(config),
    }


def program_keys(config: ConfigDict) -> dict[str, Any]:
    """Returns the keys of a config that the training step is made from; those of an optimizer begin "optimizer."."""
    return {key: value for key, value in flatten(config) if key.startswith(PROGRAM_KEYS) and key not in _ARGUMENTS}
