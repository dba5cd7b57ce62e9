"""Export and import of Hugging Face folders for `transformers`' BertForPreTraining and related classes."""

import dataclasses
import json
import logging
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath
from safetensors.numpy import save_file

from bert_jax.errors import InputError
from bert_jax.files.output_folder import new_folder, whole_folder
from bert_jax.interop.huggingface_tokenizer import read_tokenizer
from bert_jax.interop.huggingface_weights import Weight, layout, parameters_of, state_dict
from bert_jax.interop.safetensors_files import WHOLE, StoredWeight, open_weights, read_json
from bert_jax.interop.task_weights import task_model
from bert_jax.model import BertConfig
from bert_jax.model.bert import HEADS, Parameters
from bert_jax.text.tokenization import WordPieceTokenizer
from bert_jax.training.checkpointing.checkpoints import Checkpoint, check_finite

log = logging.getLogger(__name__)

CONFIG = "config.json"

ARCHITECTURES: dict[str, tuple[str, ...]] = {  # and their heads; a model is written as the first whose heads it has
    "BertForPreTraining": HEADS,
    "BertForMaskedLM": ("mlm_head",),
    "BertLMHeadModel": ("mlm_head",),
    "BertForNextSentencePrediction": ("pooler", "nsp_head"),
    "BertModel": ("pooler",),
}

_LEFT_TO_RIGHT = ("BertLMHeadModel", "BertModel")  # architectures of a left-to-right model

_TIED = {  # duplicate name of a tied weight: its name
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_NOT_HONOURED: dict[str, tuple[Any, ...]] = {  # fields of config.json: the supported values
    "model_type": (None, "bert"),
    "position_embedding_type": (None, "absolute"),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
}
_LISTED = 4  # maximum weights listed in an error


# --- Writing ---------------------------------------------------------------------------------------------------------


def model_config(config: BertConfig, tokenizer: WordPieceTokenizer, architecture: str) -> dict[str, Any]:
    """Returns the contents of `config.json`."""
    return {
        "architectures": [architecture],
        "model_type": "bert",
        **config.to_dict(),
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
    }


def export(checkpoint: Checkpoint, output: str) -> str:
    """Writes `config.json`, `model.safetensors`, `vocab.txt` and the tokenizer's files to the folder `output`.

    Returns the name of the architecture: the one with the checkpoint's heads, BertLMHeadModel for a left-to-right
    model, or that of the fine-tuned task. The folder is written atomically.

    Raises InputError if `output` is a file or a folder that is not empty, and as `task_model` does.
    """
    folder = new_folder(output)
    log.info("Reading %s and writing %s", checkpoint.path, folder)
    config, tokenizer = checkpoint.bert_config, checkpoint.tokenizer
    if checkpoint.task is not None:
        architecture, task_config, weights = task_model(checkpoint)
        described = {**model_config(config, tokenizer, architecture), **task_config}
    else:
        architecture = _architecture(checkpoint)
        heads = [head for head in ARCHITECTURES[architecture] if head in checkpoint.heads]
        if dropped := [head for head in checkpoint.heads if head not in heads]:
            log.warning("%s does not support these heads, which are not exported: %s", architecture, ", ".join(dropped))
        if not heads:
            log.warning(
                "Exported without a pooler; load it with BertModel.from_pretrained(..., add_pooling_layer=False)"
            )
        described = model_config(config, tokenizer, architecture)
        parameters = checkpoint.load_parameters()
        check_finite(checkpoint, parameters)
        weights = state_dict(parameters, config, heads)
    with whole_folder(folder, last=CONFIG) as partial:
        longest = checkpoint.task["max_seq_len"] if checkpoint.task is not None else config.max_position_embeddings
        tokenizer.save_huggingface(str(partial), model_max_length=longest)
        (partial / CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
        save_file(weights, str(partial / WHOLE), metadata={"format": "pt"})
        os.chmod(partial / WHOLE, os.stat(partial / CONFIG).st_mode & 0o777)  # save_file makes it 0600
    return architecture


def _architecture(checkpoint: Checkpoint) -> str:
    candidates = _LEFT_TO_RIGHT if checkpoint.bert_config.is_decoder else ARCHITECTURES
    return next((name for name in candidates if {*ARCHITECTURES[name]} <= {*checkpoint.heads}), "BertModel")


# --- Reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A model read from a folder; `parameters` are numpy arrays, without those of heads not in `heads`."""

    bert_config: BertConfig
    tokenizer: WordPieceTokenizer
    heads: tuple[str, ...]
    parameters: Parameters


def read(folder: epath.Path, *, lowercase: bool | None = None) -> Source:
    """Reads a folder with `config.json`, `model.safetensors` or its shards, and the tokenizer's files.

    The weights determine the heads; the heads of the architecture in `config.json` are required (except BertModel's
    pooler). `lowercase` None takes the setting of the tokenizer's files.

    Raises InputError for an unsupported field of the config, a tokenizer that is not BERT's or not of the config's
    size, and a weight that is missing, unexpected, of another shape, or tied but not equal.
    """
    config, required = _read_config(folder / CONFIG)
    tokenizer = read_tokenizer(folder, lowercase=lowercase)
    if tokenizer.vocab_size != config.vocab_size:
        raise InputError(
            f"{folder}: {CONFIG} has vocab_size={config.vocab_size}, but the tokenizer has {tokenizer.vocab_size} "
            "pieces; expected the same number"
        )
    weights = _by_canonical_name(folder, open_weights(folder))
    if config.num_hidden_layers > len(weights):  # such as 10**12, too many to list
        raise InputError(
            f"{folder}: {CONFIG} has num_hidden_layers={config.num_hidden_layers}, but got only {len(weights)} weights"
        )
    heads = tuple(head for head in HEADS if head in required or _has(weights, head))
    if "nsp_head" in heads and "pooler" not in heads:
        heads = ("pooler", *heads)  # its weights are then reported as missing
    expected = {_canonical(weight.name): weight for weight in layout(config, heads)}
    _check_weights(folder, weights, expected)
    readers = {weight.name: weights[name].read for name, weight in expected.items()}
    return Source(config, tokenizer, heads, parameters_of(readers, config, heads))


def _read_config(path: epath.Path) -> tuple[BertConfig, Collection[str]]:
    """Returns the model's config, and the heads that the architecture requires."""
    values = read_json(path)
    for field, supported in _NOT_HONOURED.items():
        if values.get(field) not in supported:
            raise InputError(f"{path}: {field}={values[field]!r} is not supported; expected {supported[-1]!r}")
    named = named_architectures(path, values)
    if unknown := [name for name in named if name not in ARCHITECTURES]:
        raise InputError(
            f"{path}: architectures={unknown} is not supported; expected one of {', '.join(ARCHITECTURES)}"
        )
    fields = {field.name for field in dataclasses.fields(BertConfig)}
    try:
        config = BertConfig.from_dict({name: value for name, value in values.items() if name in fields})
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {error}") from error
    return config, {head for name in named if name != "BertModel" for head in ARCHITECTURES[name]}


def named_architectures(path: epath.Path, values: dict[str, Any]) -> list[str]:
    """Returns the model classes listed in `config.json`, [] if absent. InputError if it is not a list of names."""
    named = values.get("architectures")
    if named is None:
        return []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise InputError(f"{path}: architectures={named!r:.60}: expected a list of names")
    return named


def _canonical(name: str) -> str:
    """Returns the current name in BertForPreTraining: with `bert.`, and weight and bias instead of gamma and beta."""
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))


def _by_canonical_name(folder: epath.Path, weights: dict[str, StoredWeight]) -> dict[str, StoredWeight]:
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


def _check_weights(folder: epath.Path, weights: dict[str, StoredWeight], expected: dict[str, Weight]) -> None:
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
        raise InputError(f"{folder}: the weights do not match {CONFIG}: {'. '.join(problems)}")
