"""Fine-tuned checkpoints loaded as runnable models, for prediction, scoring and use in Python."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from bert_jax.config import ConfigDict, load_config
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.finetuning.finetune import RESULT_FILE
from bert_jax.finetuning.inputs.batching import Encoding, Rows
from bert_jax.finetuning.prediction import Predictor
from bert_jax.finetuning.trained_tasks import TRAINED, Record, TrainedTask
from bert_jax.model import abstract_parameters
from bert_jax.model.bert import Parameters
from bert_jax.model.task_heads import BertForTask, TaskHead
from bert_jax.parallel.mesh import make_mesh
from bert_jax.parallel.sharding import parameter_shardings
from bert_jax.training.checkpointing.checkpoints import Checkpoint
from bert_jax.training.checks import check_batch_size, compute_dtype

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FineTunedModel:
    """A fine-tuned checkpoint's parameters on devices, and a predictor."""

    mesh: Mesh
    graph: nnx.GraphDef
    parameters: Parameters
    predictor: Predictor
    batch_size: int

    def outputs(self, rows: Rows, on_batch: Callable[[], Any] = lambda: None) -> list[np.ndarray]:
        """Returns the outputs of each example; see `Predictor.run`."""
        with jax.set_mesh(self.mesh):
            return self.predictor.run(self.parameters, rows, on_batch)


def open_model(
    found: Checkpoint, *, batch_size: int = 64, dtype: str = "auto", devices: Sequence[jax.Device] | None = None
) -> FineTunedModel:
    """Loads the parameters of a fine-tuned checkpoint.

    Args:
      found: a checkpoint with a task.
      batch_size: examples per batch, rounded up to a multiple of the number of devices.
      dtype: the computation dtype, as the config's `dtype`.
      devices: the devices to run on; all by default.
    """
    check_batch_size(batch_size)
    assert found.task is not None
    head = TaskHead.of_checkpoint(found.task)
    mesh = make_mesh(ConfigDict({"data": -1, "fsdp": 1, "tensor": 1}), devices)
    computed: jnp.dtype = compute_dtype(dtype)
    graph, _, info = abstract_parameters(found.bert_config, build=BertForTask, head=head, dtype=computed)
    shardings = parameter_shardings(mesh, info)
    parameters = found.load_parameters(shardings, build=BertForTask, head=head)
    batch_size = -(-batch_size // mesh.size) * mesh.size
    predictor = Predictor(
        mesh, graph, shardings, found.tokenizer, batch_size=batch_size, max_seq_len=found.task["max_seq_len"]
    )
    return FineTunedModel(mesh, graph, parameters, predictor, batch_size)


def trained_task(found: Checkpoint) -> TrainedTask:
    """Returns the task of a fine-tuned checkpoint. InputError if it is not fine-tuned, or has an unknown task."""
    if found.task is None:
        raise InputError(f"{found.path}: not a fine-tuned checkpoint; give the --workdir of `bert-jax finetune`")
    make = TRAINED.get(found.task["name"].partition("/")[0])
    if make is None:
        raise InputError(f"{found.path}: unknown task {found.task['name']!r}; expected one of {', '.join(TRAINED)}")
    last_position = found.bert_config.is_decoder
    return make(_record(found), Encoding(found.tokenizer, found.task["max_seq_len"], last_position))


def _record(found: Checkpoint) -> Record:
    """Returns a checkpoint's record, completed from its run's config and then the defaults: old records lack keys."""
    defaults = load_config("finetune/default", keys_of="finetune/default").task.to_dict()
    threshold = _null_threshold(found)
    return {**defaults, **found.config.get("task", {}), "null_threshold": threshold, **(found.task or {})}


def _null_threshold(found: Checkpoint) -> float | None:
    """Returns the null odds, tuned on dev by the run, above which SQuAD 2.0 has no answer; None if unknown."""
    path = found.path.parent.parent / RESULT_FILE
    if (found.task or {})["name"] != "squad/2.0":
        return None
    result = json.loads(remote.patiently(path, path.read_text)) if remote.exists(path) else {}
    if result.get("step") != found.step or not result.get("scores"):
        log.warning(
            "%s: null threshold not found in %s; predictions use 0, scores the best threshold for the scored data",
            found.path,
            RESULT_FILE,
        )
        return None
    return float(next(iter(result["scores"].values()))["best_f1_thresh"])
