"""Hugging Face folders, of `transformers`' BertForPreTraining and its kin, written and read."""

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

ARCHITECTURES: dict[str, tuple[str, ...]] = {  # and their heads; the first that a model has all of is its own
    "BertForPreTraining": HEADS,
    "BertForMaskedLM": ("mlm_head",),
    "BertLMHeadModel": ("mlm_head",),
    "BertForNextSentencePrediction": ("pooler", "nsp_head"),
    "BertModel": ("pooler",),
}

_LEFT_TO_RIGHT = ("BertLMHeadModel", "BertModel")  # those that a left-to-right model is written as

_TIED = {  # a weight that is another one under a second name
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_NOT_HONOURED: dict[str, tuple[Any, ...]] = {  # fields of config.json: values that mean what this model does
    "model_type": (None, "bert"),
    "position_embedding_type": (None, "absolute"),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
}
_NAMED = 4  # weights in one error


# --- Writing ---------------------------------------------------------------------------------------------------------


def model_config(config: BertConfig, tokenizer: WordPieceTokenizer, architecture: str) -> dict[str, Any]:
    """The contents of `config.json`."""
    return {
        "architectures": [architecture],
        "model_type": "bert",
        **config.to_dict(),
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
    }


def export(checkpoint: Checkpoint, output: str) -> str:
    """Writes `config.json`, `model.safetensors`, `vocab.txt` and the tokenizer's files to the folder `output`.

    The architecture is the one that has the checkpoint's heads, BertLMHeadModel for a left-to-right model, or that of
    the task it is fine-tuned on; its name is returned. The folder is there whole or not at all.

    Raises InputError where `output` is a file or a folder with something in it, and as `task_model` does.
    """
    folder = new_folder(output)
    config, tokenizer = checkpoint.bert_config, checkpoint.tokenizer
    if checkpoint.task is not None:
        architecture, of_task, weights = task_model(checkpoint)
        described = {**model_config(config, tokenizer, architecture), **of_task}
    else:
        architecture = _architecture(checkpoint)
        heads = [head for head in ARCHITECTURES[architecture] if head in checkpoint.heads]
        if left_out := [head for head in checkpoint.heads if head not in heads]:
            log.warning("%s has no %s: it is left out", architecture, ", ".join(left_out))
        if not heads:
            log.warning("there is no pooler: load it with BertModel.from_pretrained(..., add_pooling_layer=False)")
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
    of_its_kind = _LEFT_TO_RIGHT if checkpoint.bert_config.is_decoder else ARCHITECTURES
    return next((name for name in of_its_kind if {*ARCHITECTURES[name]} <= {*checkpoint.heads}), "BertModel")


# --- Reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A model read from a folder; `parameters` are numpy, and lack what is not in `heads`."""

    bert_config: BertConfig
    tokenizer: WordPieceTokenizer
    heads: tuple[str, ...]
    parameters: Parameters


def read(folder: epath.Path, *, lowercase: bool | None = None) -> Source:
    """Reads a folder with `config.json`, `model.safetensors` or its shards, and the tokenizer's files.

    Which heads there are is for the weights to say; those of the architecture that `config.json` names have to be there
    (but BertModel's pooler). `lowercase` None is what the tokenizer's files say.

    Raises InputError that names what is wrong: a field of the config that this model has not, a tokenizer that is not
    BERT's or not of the config's size, and a weight that is missing, unexpected, of another shape or tied and unequal.
    """
    config, required = _read_config(folder / CONFIG)
    tokenizer = read_tokenizer(folder, lowercase=lowercase)
    if tokenizer.vocab_size != config.vocab_size:
        raise InputError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} pieces and {CONFIG} vocab_size={config.vocab_size}: "
            "they have to be equal"
        )
    weights = _by_canonical_name(folder, open_weights(folder))
    if config.num_hidden_layers > len(weights):  # such as 10**12, which are too many to be named one by one
        raise InputError(
            f"{folder}: {CONFIG} has num_hidden_layers={config.num_hidden_layers}, and there are {len(weights)} weights"
        )
    heads = tuple(head for head in HEADS if head in required or _has(weights, head))
    if "nsp_head" in heads and "pooler" not in heads:
        heads = ("pooler", *heads)  # whose weights are then missing
    wanted = {_canonical(weight.name): weight for weight in layout(config, heads)}
    _check_weights(folder, weights, wanted)
    readers = {weight.name: weights[name].read for name, weight in wanted.items()}
    return Source(config, tokenizer, heads, parameters_of(readers, config, heads))


def _read_config(path: epath.Path) -> tuple[BertConfig, Collection[str]]:
    """The model's config, and the heads that the architecture has to have."""
    values = read_json(path)
    for field, fine in _NOT_HONOURED.items():
        if values.get(field) not in fine:
            raise InputError(f"{path}: {field} is {values[field]!r}: such a model cannot be read")
    named = named_architectures(path, values)
    if unknown := [name for name in named if name not in ARCHITECTURES]:
        raise InputError(f"{path}: architectures has {', '.join(unknown)}: {', '.join(ARCHITECTURES)} can be read")
    fields = {field.name for field in dataclasses.fields(BertConfig)}
    try:
        config = BertConfig.from_dict({name: value for name, value in values.items() if name in fields})
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {error}") from error
    return config, {head for name in named if name != "BertModel" for head in ARCHITECTURES[name]}


def named_architectures(path: epath.Path, values: dict[str, Any]) -> list[str]:
    """What `config.json` names as the model's classes, nothing where it does not say. InputError for no list."""
    named = values.get("architectures")
    if named is None:
        return []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise InputError(f"{path}: architectures is {named!r:.60}: a list of names is wanted")
    return named


def _canonical(name: str) -> str:
    """The name as BertForPreTraining has it today: with `bert.`, and weight and bias where it was gamma and beta."""
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))


def _by_canonical_name(folder: epath.Path, weights: dict[str, StoredWeight]) -> dict[str, StoredWeight]:
    """Without buffers, and with each tied weight once. InputError where two that are to be one are unequal."""
    result: dict[str, StoredWeight] = {}
    for name, weight in weights.items():
        canonical = _canonical(name)
        if canonical in result:
            raise InputError(f"{folder}: {result[canonical].name} and {name} are two names of one weight")
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
                f"{list(other.shape)}: a model whose output is not tied to its embeddings cannot be read"
            )
    return result


def _has(weights: Collection[str], head: str) -> bool:
    begins = {"pooler": "bert.pooler.", "mlm_head": "cls.predictions.", "nsp_head": "cls.seq_relationship."}[head]
    return any(name.startswith(begins) for name in weights)


def _check_weights(folder: epath.Path, weights: dict[str, StoredWeight], wanted: dict[str, Weight]) -> None:
    missing = [f"{weight.name} {list(weight.shape)}" for name, weight in wanted.items() if name not in weights]
    unexpected = [f"{weight.name} {list(weight.shape)}" for name, weight in weights.items() if name not in wanted]
    misshapen = [
        f"{weights[name].name} {list(weights[name].shape)}, not {list(weight.shape)}"
        for name, weight in wanted.items()
        if name in weights and weights[name].shape != weight.shape
    ]
    problems = [
        f"{what}: {'; '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if names
    ]
    if problems:
        raise InputError(f"{folder}: the weights do not fit {CONFIG}: {'. '.join(problems)}")
