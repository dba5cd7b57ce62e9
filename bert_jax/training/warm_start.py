"""Starting a run from another's parameters: a CHECKPOINT named by `init`."""

import logging

from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.training.checkpointing.checkpoints import Checkpoint, open_checkpoint
from bert_jax.training.checks import check_tokenizer
from bert_jax.training.state import StateSpec, TrainState

log = logging.getLogger(__name__)

# What a model may have otherwise than the checkpoint: neither the shape nor the meaning of a parameter.
_FREE = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")


def open_init(location: str, model: BertConfig, dataset: PreparedDataset, *, missing_heads: bool = False) -> Checkpoint:
    """The checkpoint to start from.

    Raises InputError where it is of another vocabulary or of other sizes, or lacks a head and `missing_heads` does not
    allow that.
    """
    checkpoint = open_checkpoint(location)
    check_tokenizer(checkpoint, dataset)
    has, wanted = checkpoint.bert_config.to_dict(), model.to_dict()
    different = [
        f"{name} {has[name]!r} (here model.{name}={wanted[name]!r})"
        for name in has
        if has[name] != wanted[name] and name not in _FREE
    ]
    if different:
        raise InputError(f"init: {checkpoint.path} has {', '.join(different)}: set the same")
    if checkpoint.missing_heads and not missing_heads:
        raise InputError(
            f"init: {checkpoint.path} has no {', '.join(checkpoint.missing_heads)}: set init_missing_heads=True to "
            "start with new ones"
        )
    return checkpoint


def start_from(checkpoint: Checkpoint, spec: StateSpec) -> TrainState:
    """A new state with the checkpoint's parameters: step 0, empty moments.

    What the model has and the checkpoint does not, a head or a task's output, is the new state's.
    """
    parts = spec.abstract.parameters
    shared = [part for part in parts if part in ("embeddings", "encoder", *checkpoint.heads)]
    loaded = checkpoint.load_parameters(spec.shardings.parameters, parts=shared)
    log.info("starting with the parameters of %s", checkpoint.path)
    if missing := [part for part in parts if part not in loaded]:
        log.info("initialised anew, from the seed: %s", ", ".join(missing))
    return spec.make(loaded)
