"""Warm start: initializes a run from the parameters of the CHECKPOINT in `init`."""

import logging

from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.training.checkpointing.checkpoints import Checkpoint, open_checkpoint
from bert_jax.training.checks import check_tokenizer
from bert_jax.training.state import StateSpec, TrainState

log = logging.getLogger(__name__)

# Fields in which the model may differ from the checkpoint: they change no shape and no meaning of a parameter.
_FREE = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")


def open_init(location: str, model: BertConfig, dataset: PreparedDataset, *, missing_heads: bool = False) -> Checkpoint:
    """Opens the checkpoint to initialize from.

    Raises InputError if its vocabulary or sizes differ, or if it lacks a head and `missing_heads` is False.
    """
    checkpoint = open_checkpoint(location)
    check_tokenizer(checkpoint, dataset)
    saved, expected = checkpoint.bert_config.to_dict(), model.to_dict()
    different = [
        f"{name}={saved[name]!r} (here model.{name}={expected[name]!r})"
        for name in saved
        if saved[name] != expected[name] and name not in _FREE
    ]
    if different:
        raise InputError(f"init={checkpoint.path}: was trained with {', '.join(different)}; set the same values")
    if checkpoint.missing_heads and not missing_heads:
        raise InputError(
            f"init={checkpoint.path}: has no {', '.join(checkpoint.missing_heads)}; set init_missing_heads=True to "
            "initialize them randomly"
        )
    return checkpoint


def initialize_from(checkpoint: Checkpoint, spec: StateSpec) -> TrainState:
    """Makes a new state with the checkpoint's parameters, at step 0 with zero moments.

    Parts that the checkpoint lacks, a head or a task's output, are initialized randomly.
    """
    parts = spec.abstract.parameters
    shared = [part for part in parts if part in ("embeddings", "encoder", *checkpoint.heads)]
    loaded = checkpoint.load_parameters(spec.shardings.parameters, parts=shared)
    log.info("Initialized from the parameters of %s", checkpoint.path)
    if missing := [part for part in parts if part not in loaded]:
        log.info("Initialized randomly from the seed: %s", ", ".join(missing))
    return spec.make(loaded)
