"""Models of other software: finds the weights of a folder, checks every one of them, opens or imports the model."""

import dataclasses
import logging
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.atomic import read_json
from bert_jax.interop import tensorflow_checkpoints
from bert_jax.interop.architectures import (
    ARCHITECTURES,
    model_type_of,
    named_architecture,
    read_model_config,
    read_task,
)
from bert_jax.interop.weights import WHOLE, StoredWeight, Weight, layout, open_weights, parameters_of
from bert_jax.model import BertConfig, abstract_parameters
from bert_jax.model.bert import HEADS, Parameters
from bert_jax.model.task_heads import model_settings
from bert_jax.text.conversion import VOCABULARY, open_folder, read_vocab_file
from bert_jax.text.tokenizer import FILE, SETTINGS, Tokenizer, read_settings, read_tokenizer
from bert_jax.training.checkpoints import FOLDER, Checkpoint, check_place, open_checkpoint, save_parameters

log = logging.getLogger(__name__)

CONFIG = "config.json"
_TENSORFLOW_CONFIG = "bert_config.json"

_SHARDED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")  # ends of the names of single files
_SMALL = (".json", ".txt", ".model")  # ends of the names of files beside the weights

_TIED = {  # duplicate name of a tied weight: its name
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "decoder.weight": "model.embeddings.tok_embeddings.weight",
}
_WORDS = re.compile(r"((bert\.)?embeddings\.word|(model\.)?embeddings\.tok)_embeddings\.weight$")  # of every model
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
        return jax.tree.map(
            lambda leaf, value: jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda at: value[at]),
            target, {part: read[part] for part in target},
        )  # fmt: skip


def import_checkpoint(
    source: str, output: str, *, lowercase: bool | None = None, layers: Sequence[int] | None = None,
    drop: Sequence[str] = (),
) -> Checkpoint:  # fmt: skip
    """Converts a model to a checkpoint of parameters in `output`, written atomically.

    The weights determine the heads; the heads of the class in `config.json` are required (except BertModel's pooler).

    Args:
      source: a folder of `transformers` with weights, `config.json` and the tokenizer's files, or a file of weights in
        one; or a folder with a TensorFlow checkpoint, `bert_config.json` and `vocab.txt`, or its prefix.
      output: a new folder; see `training.checkpoints` for its contents.
      lowercase: whether text is lowercased; None takes the source's setting.
      layers: the layers to import, from 0 and in their new order, such as (0, 2, 4); a layer may be repeated. None for
        all.
      drop: beginnings of the names of weights that are not imported, such as `crf.`; all others must be used.

    Raises:
      InputError: `output` already exists, or `source` holds no readable BERT; also for a tokenizer that is not BERT's
        or not of the config's size, and a weight that is missing, unexpected, of another shape, or tied but not equal.
        No code of a pickle is ever run.
    """
    folder = atomic.new_folder(output)
    check_place(folder)
    found = open_source(source, lowercase=lowercase, layers=layers, drop=drop)
    parameters = found.read_parameters()
    log.info("Writing %s", folder)
    save_parameters(
        folder, parameters, bert_config=found.bert_config, tokenizer=found.tokenizer, heads=found.heads,
        task=found.task, inputs={"source": {"path": source}},
    )  # fmt: skip
    return open_checkpoint(output)


def open_tokenizer(location: str) -> Tokenizer:
    """Opens a tokenizer with all of its rules.

    Args:
      location: a `tokenizer.json`; a folder with one: a dataset, an export, or one of `transformers`; a folder of
        `transformers` with a `vocab.txt` or a SentencePiece model; or a CHECKPOINT.

    Raises InputError for anything else.
    """
    path = remote.parse_path(location)
    if path.suffix == ".json":
        return read_tokenizer(path)
    if path.suffix in (".txt", ".model") and not path.is_dir():
        raise InputError(f"{location}: expected a {FILE}; convert it: bert-jax vocab --from {location} --output {FILE}")
    is_workdir = remote.exists(path / FOLDER)  # which has a config.json of another kind
    if not is_workdir and any(remote.exists(path / name) for name in (FILE, CONFIG, SETTINGS)):
        with _on_this_machine(path, [name for name in _names(path) if name.endswith(_SMALL)]) as folder:
            return open_folder(folder)
    return open_checkpoint(location).tokenizer


def holds_model(location: str) -> bool:
    """Returns whether a folder has weights of other software, or a path is such a file or a checkpoint's prefix."""
    return bool(_locate(remote.parse_path(location))[1])


def open_source(location: str, **options: Any) -> ForeignCheckpoint:
    """Opens the model that `import_checkpoint` would import from `location`, and writes nothing.

    The weights of local files are read by each `load_parameters`; those of a store are read here. `options` are those
    of `import_checkpoint`. Raises InputError if `location` holds no readable model.
    """
    path = remote.parse_path(location)
    log.info("Reading %s", location)
    folder, candidates = _locate(path)
    if not candidates:
        raise InputError(
            f"{path}: no model found; expected a folder with {CONFIG} and {WHOLE}, a file of weights in it, or a "
            f"TensorFlow checkpoint with {_TENSORFLOW_CONFIG}"
        )
    if len(candidates) > 1:
        raise InputError(f"{folder}: found several models, {', '.join(candidates)}; give one of these files")
    # Files of weights begin alike, and small ones lie beside them.
    needed = [name for name in _names(folder) if name.startswith(candidates[0].split(".")[0]) or name.endswith(_SMALL)]
    with _on_this_machine(folder, needed) as local:
        found = _read(local / candidates[0], **options)
        if remote.is_remote(path):  # whose local copy is deleted below
            found = dataclasses.replace(found, read_parameters=partial(dict, found.read_parameters()))
    return dataclasses.replace(found, path=path)


def _names(folder: epath.Path) -> list[str]:
    return [path.name for path in remote.children(folder)]


def _locate(path: epath.Path) -> tuple[epath.Path, list[str]]:
    """Returns the folder of a model and the files that may hold its weights; of a given file, itself in its folder.

    They are those that `transformers` reads, safetensors first. A TensorFlow checkpoint, whose index stands for it,
    comes before a pickle; without any of these they are all files whose names end as those of weights.
    """
    names = _names(path)
    folder = path if names else path.parent
    if not names:  # a file, or the prefix of a checkpoint
        given = {f"{tensorflow_checkpoints.prefix_name(path.name)}{tensorflow_checkpoints.INDEX}", path.name}
        names = [name for name in given if remote.exists(folder / name)]
    indices = [name for name in names if name.endswith(tensorflow_checkpoints.INDEX)]
    usual = ([WHOLE], [_SHARDED[0]], indices, ["pytorch_model.bin"], [_SHARDED[1]])
    groups = (*usual, [name for name in names if name.endswith(_SINGLE)])
    return folder, next((group for group in groups if group and {*group} <= {*names}), [])


@contextmanager
def _on_this_machine(folder: epath.Path, names: Sequence[str]) -> Iterator[epath.Path]:
    """Yields a folder, or a local copy of its files with these names; errors name the given path."""
    if not remote.is_remote(folder):
        yield folder
        return
    store, place = remote.store_of(folder)
    with tempfile.TemporaryDirectory(prefix="bert-jax-") as copy:
        with remote.store_errors(folder):
            for name in names:
                store.get_file(f"{place}/{name}", f"{copy}/{name}")
        try:
            yield epath.Path(copy)
        except InputError as error:
            raise InputError(str(error).replace(copy, str(folder))) from error


def _read(
    file: epath.Path, *, lowercase: bool | None = None, layers: Sequence[int] | None = None, drop: Sequence[str] = ()
) -> ForeignCheckpoint:
    """Describes the model of a file of weights, an index of shards, or the index of a TensorFlow checkpoint."""
    folder, is_tensorflow = file.parent, file.name.endswith(tensorflow_checkpoints.INDEX)
    path = folder / (_TENSORFLOW_CONFIG if is_tensorflow else CONFIG)
    if not path.exists():
        raise InputError(f"{folder}: {path.name} not found; copy it from the source of the weights")
    values = read_json(path)
    if is_tensorflow and values.get("hidden_act") == "gelu":  # the tanh form in the code that wrote these checkpoints
        values = {**values, "hidden_act": "gelu_new"}
    architecture, config = named_architecture(path, values), read_model_config(path, values)
    if is_tensorflow:
        stated = read_settings(folder).get("do_lower_case") if lowercase is None else lowercase
        tokenizer = read_vocab_file(folder / VOCABULARY, stated)
        weights = tensorflow_checkpoints.open_variables(file.with_suffix(""))
    else:
        tokenizer = open_folder(folder, lowercase=lowercase)
        weights = _by_canonical_name(file, open_weights(file))
    weights = _without(file, weights, drop)
    output = ARCHITECTURES[architecture].output if architecture else ""
    task = None
    if drop and not any(output and name.startswith(f"{output}.") for name in weights):
        architecture = None  # then without the heads and the output that its class requires
        weights = {name: one for name, one in weights.items() if not (output and name.startswith("head."))}
    elif architecture and output:
        bias = weights.get(f"{output}.bias")
        if bias is None or len(bias.shape) != 1:
            raise InputError(f"{path}: architectures={architecture} requires {output}.weight and {output}.bias [N]")
        longest = read_settings(folder).get("model_max_length")
        longest = longest if type(longest) is int and longest > 2 else config.max_position_embeddings
        task = read_task(path, architecture, values, bias.shape[0], min(longest, config.max_position_embeddings))
    return _assemble(path, config, tokenizer, weights, architecture=architecture, task=task, layers=layers)


def _without(
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


def _assemble(
    path: epath.Path, config: BertConfig, tokenizer: Tokenizer, weights: Mapping[str, StoredWeight], *,
    architecture: str | None = None, task: dict[str, Any] | None = None, layers: Sequence[int] | None = None,
) -> ForeignCheckpoint:  # fmt: skip
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
        raise InputError(f"{path}: vocab_size={config.vocab_size}: the tokenizer has {tokenizer.vocab_size} pieces")
    if config.num_hidden_layers > len(weights):  # such as 10**12, too many to list
        raise InputError(f"{path}: num_hidden_layers={config.num_hidden_layers}, but got only {len(weights)} weights")
    is_modern = model_type_of(config) == "modernbert"
    heads = ARCHITECTURES[architecture].heads if architecture not in (None, "BertModel") else ()
    if task is None or architecture is None:
        architecture = "ModernBertForMaskedLM" if is_modern else "BertForPreTraining"
        heads = tuple(head for head in HEADS if head in heads or _has(weights, head))
        if "nsp_head" in heads and "pooler" not in heads:
            heads = ("pooler", *heads)  # its weights are then reported as missing
    if "pooler" not in heads and _has(weights, "pooler"):
        weights = _without(path, weights, ["bert.pooler."])  # old taggers and readers have it and do not use it
    settings = model_settings(heads, task)
    outputs = settings["head"].outputs if task else 0
    _check_weights(path, weights, {weight.name: weight for weight in layout(config, architecture, heads, outputs)})
    if is_modern and layers is not None:
        raise InputError(f"layers={','.join(map(str, layers))}: a modernbert's layers differ by place; import them all")
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
        raise InputError(f"layers={given}: expected layers of {path.parent}, from 0 to {count - 1}")
    dropped = ", ".join(str(layer) for layer in range(count) if layer not in layers) or "none"
    log.info("%s: %d layers of %d are read, and these are dropped: %s", path.parent, len(layers), count, dropped)
    return layers


def _by_canonical_name(file: epath.Path, weights: Mapping[str, StoredWeight]) -> dict[str, StoredWeight]:
    """Returns the weights by their current names in BertForPreTraining, without buffers and duplicates of tied weights.

    Names are stripped of what modules around the model have given to all of them, such as `module.`; `gamma` and `beta`
    are old names of LayerNorm's. InputError if two weights have one name, or tied ones are not equal.
    """
    result: dict[str, StoredWeight] = {}
    words = [(name, match) for name in weights if (match := _WORDS.search(name))]
    wrapper = words[0][0][: words[0][1].start()] if len(words) == 1 else ""
    bare = "model." if any(match[1].endswith("tok") for _, match in words) else "bert."
    for name, weight in weights.items():
        canonical = name.removeprefix(wrapper)
        if canonical.startswith(("embeddings.", "encoder.", "pooler.", "layers.", "final_norm.")):
            canonical = f"{bare}{canonical}"
        canonical = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", canonical)
        canonical = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", canonical)
        if canonical in result:
            raise InputError(f"{file}: {result[canonical].name} and {name} are two names of one weight; delete one")
        if not canonical.endswith(".position_ids"):
            result[canonical] = weight
    for tied, to in _TIED.items():
        if duplicate := result.pop(tied, None):
            other = result.setdefault(to, duplicate)
            if duplicate.shape != other.shape or not np.array_equal(duplicate.read(), other.read()):
                raise InputError(
                    f"{file}: {duplicate} is not equal to {other}; an output that is not tied is not supported"
                )
    return result


def _has(weights: Collection[str], head: str) -> bool:
    begins: dict[str, str | tuple[str, ...]] = {
        "pooler": "bert.pooler.", "mlm_head": ("cls.predictions.", "head.", "decoder."),
        "nsp_head": "cls.seq_relationship.",
    }  # fmt: skip
    return any(name.startswith(begins[head]) for name in weights)


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
    if problems := ". ".join(f"{problem}: {_listed(group)}" for problem, group in groups.items() if group):
        fix = "; to import it without some, name their beginnings with bert-jax import --drop" if unexpected else ""
        raise InputError(f"{path.parent}: the weights do not match {path.name}: {problems}{fix}")
