"""Reads models of `transformers`: a pre-trained BERT with the heads it has, or a fine-tuned one with its output."""

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.errors import InputError
from bert_jax.interop.architectures import ARCHITECTURES, named_architecture, read_task
from bert_jax.interop.huggingface_weights import Weight, layout, model_settings, parameters_of
from bert_jax.interop.weight_files import StoredWeight, open_weights, read_json
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import HEADS, Parameters
from bert_jax.text.conversion import open_folder
from bert_jax.text.tokenizer import Tokenizer, read_settings
from bert_jax.training.checkpoints import Checkpoint

log = logging.getLogger(__name__)

CONFIG = "config.json"

_TIED = {  # duplicate name of a tied weight: its name
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_POSITIONS = "embeddings.position_embeddings.weight"  # which every BERT has
_LAYER = re.compile(r"(bert\.encoder\.layer\.)(\d+)\b")
_LISTED = 4  # maximum weights listed in an error


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint(Checkpoint):
    """A model in files of other software, described and checked; it has no checksums that a load could verify.

    `read_parameters` reads the weights as numpy arrays. InputError for a weight that is damaged or not finite.
    """

    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    step: int = 0
    dataset_hashes: tuple[str, ...] = ()
    read_parameters: Callable[[], Parameters]

    def reference(self) -> dict[str, Any]:
        """Returns `path` and `step`; there is no `digest`."""
        return {"path": str(self.path), "step": self.step, "digest": None}

    def _restore(self, target: Parameters, *, is_partial: bool) -> Parameters:
        read = self.read_parameters()
        result: Parameters = jax.tree.map(
            lambda leaf, value: jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda at: value[at]),
            target, {part: read[part] for part in target},
        )  # fmt: skip
        return result


def read(
    file: epath.Path, *, lowercase: bool | None = None, layers: Sequence[int] | None = None, drop: Sequence[str] = ()
) -> ForeignCheckpoint:
    """Reads a file of weights, or the index of shards, with `config.json` and the tokenizer's files in its folder.

    The weights determine the heads; the heads of the class in `config.json` are required (except BertModel's pooler).
    `lowercase` None takes the setting of the tokenizer's files. For `layers` and `drop` see `import_checkpoint`.

    Raises InputError for another architecture than BERT, an unsupported field of the config, a tokenizer that is not
    BERT's or not of the config's size, and a weight that is missing, unexpected, of another shape, or tied but not
    equal.
    """
    path = file.parent / CONFIG
    values = read_json(path)
    architecture = named_architecture(path, values)
    config = bert_config(path, values)
    tokenizer = open_folder(file.parent, lowercase=lowercase)
    weights = drop_weights(file, _by_canonical_name(file, open_weights(file)), drop)
    output = ARCHITECTURES[architecture].output if architecture else ""
    task = None
    if drop and not any(output and name.startswith(f"{output}.") for name in weights):
        architecture = None  # then without the heads and the output that its class requires
    elif architecture and output:
        bias = weights.get(f"{output}.bias")
        if bias is None or len(bias.shape) != 1:
            raise InputError(f"{path}: architectures={architecture} requires {output}.weight and {output}.bias [N]")
        longest = read_settings(file.parent).get("model_max_length")
        longest = longest if type(longest) is int and longest > 2 else config.max_position_embeddings
        longest = min(longest, config.max_position_embeddings)
        task = read_task(path, architecture, values, bias.shape[0], longest)
    return assemble(path, config, tokenizer, weights, architecture=architecture, task=task, layers=layers)


def bert_config(path: epath.Path, values: Mapping[str, Any]) -> BertConfig:
    """Returns the model's config from a JSON object, whose other keys are ignored. InputError if it is invalid."""
    fields = {field.name for field in dataclasses.fields(BertConfig)}
    try:
        return BertConfig.from_dict({name: value for name, value in values.items() if name in fields})
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def drop_weights(
    file: epath.Path, weights: Mapping[str, StoredWeight], beginnings: Sequence[str]
) -> dict[str, StoredWeight]:
    """Returns the weights without those whose name, here or in the file, has one of some beginnings; logs them.

    Raises InputError for a beginning that no weight has.
    """
    dropped: dict[str, StoredWeight] = {}
    for beginning in beginnings:
        matched = {name: weight for name, weight in weights.items()
                   if name.startswith(beginning) or weight.name.startswith(beginning)}  # fmt: skip
        if not matched or not beginning:
            raise InputError(f"drop={beginning}: {file} has no weight whose name begins so, or it is empty; remove it")
        dropped |= matched
    if dropped:
        log.warning("%s: dropped %s", file, _listed(dropped.values()))
    return {name: weight for name, weight in weights.items() if name not in dropped}


def assemble(
    path: epath.Path,
    config: BertConfig,
    tokenizer: Tokenizer,
    weights: Mapping[str, StoredWeight],
    *,
    architecture: str | None = None,
    task: dict[str, Any] | None = None,
    layers: Sequence[int] | None = None,
) -> ForeignCheckpoint:
    """Describes a model. InputError, with names and shapes, for weights that do not match.

    Args:
      path: the config's file, for errors.
      config: the model's sizes.
      tokenizer: the model's tokenizer.
      weights: by their names in BertForPreTraining and in fine-tuned classes, with shapes in `transformers`.
      architecture: the class, whose heads are required; None for a pre-trained one with the heads that there are.
      task: the record of a fine-tuned model.
      layers: the layers to read, in their new order; None for all.
    """
    if tokenizer.vocab_size != config.vocab_size:
        raise InputError(
            f"{path.parent}: {path.name} has vocab_size={config.vocab_size}, but the tokenizer has "
            f"{tokenizer.vocab_size} pieces; expected the same number"
        )
    if config.num_hidden_layers > len(weights):  # such as 10**12, too many to list
        raise InputError(
            f"{path.parent}: {path.name} has num_hidden_layers={config.num_hidden_layers}, but got only "
            f"{len(weights)} weights, {_listed(weights.values())}"
        )
    heads = ARCHITECTURES[architecture].heads if architecture not in (None, "BertModel") else ()
    if task is None or architecture is None:
        architecture = "BertForPreTraining"
        heads = tuple(head for head in HEADS if head in heads or _has(weights, head))
        if "nsp_head" in heads and "pooler" not in heads:
            heads = ("pooler", *heads)  # its weights are then reported as missing
    elif not heads and _has(weights, "pooler"):  # `transformers` had a pooler in such models until version 3
        log.warning("%s: dropped the pooler, which %s does not use", path.parent, architecture)
        weights = {name: weight for name, weight in weights.items() if not name.startswith("bert.pooler.")}
    settings = model_settings(heads, task)
    outputs = settings["head"].outputs if task else 0
    _check_weights(path, weights, {weight.name: weight for weight in layout(config, architecture, heads, outputs)})
    kept = _kept_layers(path, config, layers)
    config = dataclasses.replace(config, num_hidden_layers=len(kept))
    _, shapes, _ = abstract_parameters(config, **settings)

    def read_weight(name: str) -> np.ndarray:
        return weights[_LAYER.sub(lambda found: f"{found[1]}{kept[int(found[2])]}", name)].read()

    return ForeignCheckpoint(
        path=path.parent, bert_config=config, tokenizer=tokenizer, heads=heads, task=task,
        read_parameters=partial(parameters_of, shapes, layout(config, architecture, heads, outputs), read_weight),
    )  # fmt: skip


def _kept_layers(path: epath.Path, config: BertConfig, layers: Sequence[int] | None) -> Sequence[int]:
    count = config.num_hidden_layers
    if layers is None:
        return range(count)
    if not layers or not all(0 <= layer < count for layer in layers):
        given = ",".join(map(str, layers))
        raise InputError(
            f"layers={given}: expected layers of {path.parent}, from 0 to {count - 1}, such as 0,{count - 1}"
        )
    dropped = [layer for layer in range(count) if layer not in layers]
    log.info("%s: %d layers of %d are read, and these are dropped: %s", path.parent, len(layers), count,
             ", ".join(map(str, dropped)) or "none")  # fmt: skip
    return layers


def _canonical(name: str) -> str:
    """Returns the current name in BertForPreTraining: with `bert.`, and weight and bias instead of gamma and beta."""
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))


def _wrapper(names: Collection[str]) -> str:
    """Returns the beginning that modules around the model have given to all names, such as `module.`."""
    positions = [name for name in names if name.endswith(_POSITIONS)]
    return positions[0].removesuffix(_POSITIONS).removesuffix("bert.") if len(positions) == 1 else ""


def _by_canonical_name(file: epath.Path, weights: Mapping[str, StoredWeight]) -> dict[str, StoredWeight]:
    """Drops buffers and duplicates of tied weights. InputError if tied weights are not equal."""
    result: dict[str, StoredWeight] = {}
    wrapper = _wrapper(weights)
    for name, weight in weights.items():
        canonical = _canonical(name.removeprefix(wrapper))
        if canonical in result:
            raise InputError(f"{file}: {result[canonical].name} and {name} are two names of one weight; delete one")
        if not canonical.endswith(".position_ids"):
            result[canonical] = weight
    for tied, to in _TIED.items():
        if tied not in result:
            continue
        duplicate = result.pop(tied)
        other = result.setdefault(to, duplicate)
        if duplicate.shape != other.shape or not np.array_equal(duplicate.read(), other.read()):
            raise InputError(
                f"{file}: {duplicate} is not equal to {other}; a model whose output is not tied to its embeddings is "
                "not supported"
            )
    return result


def _has(weights: Collection[str], head: str) -> bool:
    begins = {"pooler": "bert.pooler.", "mlm_head": "cls.predictions.", "nsp_head": "cls.seq_relationship."}[head]
    return any(name.startswith(begins) for name in weights)


def _listed(weights: Collection[StoredWeight | Weight | str]) -> str:
    more = f" and {len(weights) - _LISTED} more" if len(weights) > _LISTED else ""
    return "; ".join(map(str, [*weights][:_LISTED])) + more


def _check_weights(path: epath.Path, weights: Mapping[str, StoredWeight], expected: Mapping[str, Weight]) -> None:
    unexpected = [weight for name, weight in weights.items() if name not in expected]
    groups: dict[str, list[Any]] = {
        "missing": [weight for name, weight in expected.items() if name not in weights],
        "unexpected": unexpected,
        "wrong shape": [
            f"{weights[name]}, expected {list(weight.shape)}"
            for name, weight in expected.items() if name in weights and weights[name].shape != weight.shape
        ],
    }  # fmt: skip
    problems = [f"{problem}: {_listed(group)}" for problem, group in groups.items() if group]
    if problems:
        fix = "; to import the model without them, give `bert-jax import --drop` the beginnings of their names"
        raise InputError(
            f"{path.parent}: the weights do not match {path.name}: {'. '.join(problems)}{fix if unexpected else ''}"
        )
