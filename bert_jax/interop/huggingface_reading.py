"""Reads a folder of `transformers`: a pre-trained BERT with the heads it has, or a fine-tuned one with its output."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from bert_jax.errors import InputError
from bert_jax.interop.architectures import TASK_CLASSES, check_is_bert, named_architectures, required_heads
from bert_jax.interop.export_digests import warn_of_changes
from bert_jax.interop.huggingface_weights import Weight, layout, parameters_of
from bert_jax.interop.task_weights import read_task
from bert_jax.interop.weight_files import StoredWeight, open_weights, read_json
from bert_jax.model import BertConfig
from bert_jax.model.bert import HEADS, Parameters
from bert_jax.text.conversion import open_folder
from bert_jax.text.tokenizer import Tokenizer, read_settings

CONFIG = "config.json"

_TIED = {  # duplicate name of a tied weight: its name
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_LISTED = 4  # maximum weights listed in an error


@dataclass(frozen=True)
class Source:
    """A model in files of other software, described and checked, but with its weights still in the files.

    Attributes:
      bert_config: the sizes.
      tokenizer: the tokenizer.
      heads: the heads that it has.
      read_parameters: reads the weights; returns numpy arrays, without those of heads not in `heads`. InputError for a
        weight that is damaged or not finite.
      task: the record of a fine-tuned model, whose parameters have an `output` as well.
    """

    bert_config: BertConfig
    tokenizer: Tokenizer
    heads: tuple[str, ...]
    read_parameters: Callable[[], Parameters]
    task: dict[str, Any] | None = None


def read(folder: epath.Path, *, lowercase: bool | None = None) -> Source:
    """Reads a folder with `config.json`, the weights or their shards, and the tokenizer's files.

    The weights determine the heads; the heads of the architecture in `config.json` are required (except BertModel's
    pooler). `lowercase` None takes the setting of the tokenizer's files. Files that have changed since bert_jax
    exported the folder are logged.

    Raises InputError for another architecture than BERT, an unsupported field of the config, a tokenizer that is not
    BERT's or not of the config's size, and a weight that is missing, unexpected, of another shape, or tied but not
    equal.
    """
    warn_of_changes(folder)
    values = read_json(folder / CONFIG)
    check_is_bert(folder / CONFIG, values)
    named = named_architectures(folder / CONFIG, values)
    config = bert_config(folder / CONFIG, values)
    tokenizer = open_folder(folder, lowercase=lowercase)
    check_vocabulary(folder / CONFIG, config, tokenizer)
    weights = _by_canonical_name(folder, open_weights(folder))
    architecture = next((TASK_CLASSES[name] for name in named if name in TASK_CLASSES), None)
    if architecture is None:
        return assemble(folder / CONFIG, config, tokenizer, weights, required_heads(named))
    task = read_task(folder / CONFIG, architecture, values, weights, read_settings(folder))
    encoder = {name: weight for name, weight in weights.items() if name.startswith("bert.")}
    if task is None:  # without its output
        return assemble(folder / CONFIG, config, tokenizer, encoder, ())
    if task.is_of_tokens:  # `transformers` had a pooler in such models until version 3
        encoder = {name: weight for name, weight in encoder.items() if not name.startswith("bert.pooler.")}
    heads = () if task.is_of_tokens else ("pooler",)
    source = assemble(folder / CONFIG, config, tokenizer, encoder, heads)

    def read_parameters() -> Parameters:
        return {**source.read_parameters(), "output": task.output}

    return dataclasses.replace(source, read_parameters=read_parameters, task=task.record(config))


def bert_config(path: epath.Path, values: Mapping[str, Any]) -> BertConfig:
    """Returns the model's config from a JSON object, whose other keys are ignored. InputError if it is invalid."""
    fields = {field.name for field in dataclasses.fields(BertConfig)}
    try:
        return BertConfig.from_dict({name: value for name, value in values.items() if name in fields})
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def check_vocabulary(path: epath.Path, config: BertConfig, tokenizer: Tokenizer) -> None:
    """Raises InputError unless the tokenizer has as many pieces as the model has word embeddings."""
    if tokenizer.vocab_size != config.vocab_size:
        raise InputError(
            f"{path.parent}: {path.name} has vocab_size={config.vocab_size}, but the tokenizer has "
            f"{tokenizer.vocab_size} pieces; expected the same number"
        )


def assemble(
    path: epath.Path,
    config: BertConfig,
    tokenizer: Tokenizer,
    weights: Mapping[str, StoredWeight],
    required: Collection[str],
) -> Source:
    """Describes a pre-trained model. InputError, with names and shapes, for weights that do not match.

    Args:
      path: the config's file, for errors.
      config: the model's sizes.
      tokenizer: the model's tokenizer.
      weights: by their names in BertForPreTraining, with shapes in `transformers`.
      required: heads that must be present; others are read if they are.
    """
    if config.num_hidden_layers > len(weights):  # such as 10**12, too many to list
        raise InputError(
            f"{path.parent}: {path.name} has num_hidden_layers={config.num_hidden_layers}, but got only "
            f"{len(weights)} weights"
        )
    heads = tuple(head for head in HEADS if head in required or _has(weights, head))
    if "nsp_head" in heads and "pooler" not in heads:
        heads = ("pooler", *heads)  # its weights are then reported as missing
    expected = {_canonical(weight.name): weight for weight in layout(config, heads)}
    _check_weights(path, weights, expected)
    readers = {weight.name: weights[name].read for name, weight in expected.items()}
    return Source(config, tokenizer, heads, lambda: parameters_of(readers, config, heads))


def _canonical(name: str) -> str:
    """Returns the current name in BertForPreTraining: with `bert.`, and weight and bias instead of gamma and beta."""
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))


def _by_canonical_name(folder: epath.Path, weights: Mapping[str, StoredWeight]) -> dict[str, StoredWeight]:
    """Drops buffers and duplicates of tied weights. InputError if tied weights are not equal."""
    result: dict[str, StoredWeight] = {}
    for name, weight in weights.items():
        canonical = _canonical(name)
        if canonical in result:
            raise InputError(f"{folder}: {result[canonical].name} and {name} are two names of one weight; delete one")
        if not canonical.endswith(".position_ids"):
            result[canonical] = weight
    for tied, to in _TIED.items():
        if tied not in result:
            continue
        duplicate = result.pop(tied)
        other = result.setdefault(to, duplicate)
        if duplicate.shape != other.shape or not np.array_equal(duplicate.read(), other.read()):
            raise InputError(
                f"{folder}: {duplicate.name} {list(duplicate.shape)} is not equal to {other.name} "
                f"{list(other.shape)}; a model whose output is not tied to its embeddings is not supported"
            )
    return result


def _has(weights: Collection[str], head: str) -> bool:
    begins = {"pooler": "bert.pooler.", "mlm_head": "cls.predictions.", "nsp_head": "cls.seq_relationship."}[head]
    return any(name.startswith(begins) for name in weights)


def _check_weights(path: epath.Path, weights: Mapping[str, StoredWeight], expected: Mapping[str, Weight]) -> None:
    missing = [f"{weight.name} {list(weight.shape)}" for name, weight in expected.items() if name not in weights]
    unexpected = [f"{weight.name} {list(weight.shape)}" for name, weight in weights.items() if name not in expected]
    misshapen = [
        f"{weights[name].name} {list(weights[name].shape)}, expected {list(weight.shape)}"
        for name, weight in expected.items()
        if name in weights and weights[name].shape != weight.shape
    ]
    problems = [
        f"{what}: {'; '.join(names[:_LISTED])}{f' and {len(names) - _LISTED} more' if len(names) > _LISTED else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen))
        if names
    ]
    if problems:
        raise InputError(f"{path.parent}: the weights do not match {path.name}: {'. '.join(problems)}")
