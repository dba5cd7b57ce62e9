"""Warm start: initializes a run from the parameters of the CHECKPOINT in `init`."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bert_jax.data.dataset import PreparedDataset
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.model.bert import HEADS
from bert_jax.text.vocabulary_extension import find_extension
from bert_jax.training.checkpoints import Checkpoint, open_checkpoint
from bert_jax.training.checks import other_vocabulary_error
from bert_jax.training.growth import Growth
from bert_jax.training.state import StateSpec, TrainState

log = logging.getLogger(__name__)

_LANGUAGE_MODELS = {False: "mlm", True: "ltr"}  # by `is_decoder`
# Fields in which the model may differ from the checkpoint: they change no shape and no meaning of a parameter.
_FREE = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")


@dataclass(frozen=True)
class WarmStart:
    """A checkpoint to initialize a run from, and the growth of its parameters."""

    checkpoint: Checkpoint
    growth: Growth


def open_init(
    location: str, model: BertConfig, dataset: PreparedDataset, *, nsp: bool = True, missing_heads: bool = False
) -> WarmStart:
    """Opens the checkpoint to initialize from.

    The dataset's vocabulary may extend that of the checkpoint, and the model may have more positions.

    Raises InputError if its vocabulary or sizes differ otherwise; and if it lacks a head that the run trains, with
    `nsp` the next-sentence head as well, and `missing_heads` is False.
    """
    checkpoint = open_checkpoint(location)
    words = find_extension(checkpoint.tokenizer, dataset.tokenizer)
    if words is None:
        raise other_vocabulary_error(checkpoint, dataset)
    sizes = {name: value for name, value in model.to_dict().items() if name != "vocab_size"}
    check_sizes(checkpoint, sizes)
    trained = HEADS if nsp else ("mlm_head",)
    missing = [head for head in trained if head not in checkpoint.heads]
    if missing and not missing_heads:
        raise InputError(
            f"init={checkpoint.path}: has no {', '.join(missing)}; set init_missing_heads=True to initialize them "
            "randomly" + (", or objective.nsp=False" if "mlm_head" not in missing else "")
        )
    return WarmStart(checkpoint, Growth(checkpoint.bert_config, model, words))


def check_sizes(checkpoint: Checkpoint, sizes: Mapping[str, Any], *, source: str = "init") -> None:
    """Raises InputError if fields of BertConfig contradict those of the checkpoint, which the key `source` named."""
    saved = checkpoint.bert_config.to_dict()
    different = [
        f"objective.lm={_LANGUAGE_MODELS[saved[name]]} (here objective.lm={_LANGUAGE_MODELS[value]})"
        if name == "is_decoder" else f"{name}={saved[name]!r} (here model.{name}={value!r})"
        for name, value in sizes.items()
        if value != saved[name] and name not in _FREE
        and not (name == "max_position_embeddings" and value > saved[name])
    ]  # fmt: skip
    if different:
        raise InputError(f"{source}={checkpoint.path}: was trained with {', '.join(different)}; set the same values")


def initialize_from(checkpoint: Checkpoint, spec: StateSpec, growth: Growth | None = None) -> TrainState:
    """Makes a new state with the checkpoint's parameters, at step 0 with zero moments.

    Parts that the checkpoint lacks, a head or a task's output, are initialized randomly. The parameters first grow by
    `growth`, if any.
    """
    parts: Collection[str] = spec.abstract.parameters
    shared = [part for part in parts if part in ("embeddings", "encoder", *checkpoint.heads)]
    shardings = {part: spec.shardings.parameters[part] for part in shared}
    loaded = checkpoint.load_parameters(growth.loading_shardings(shardings) if growth else shardings, parts=shared)
    log.info("Initialized from the parameters of %s", checkpoint.path)
    if growth:
        growth.log()
        loaded = growth.grow(loaded, shardings)
    if missing := [part for part in parts if part not in loaded]:
        log.info("Initialized randomly from the seed: %s", ", ".join(missing))
    return spec.make(loaded)
