"""Reads TensorFlow checkpoints of BERT: TF1 as google-research/bert and MLPerf released them, and TF2 objects.

TensorFlow reads the files. It is an extra (`tf`), and is imported here alone.
"""

import os
import re
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from etils import epath

from bert_jax.errors import InputError, install_hint
from bert_jax.interop.huggingface_reading import ForeignCheckpoint, assemble, bert_config, drop_weights
from bert_jax.interop.tensorflow_names import VALUE, canonical_names, flat_shape, is_training_state
from bert_jax.interop.weight_files import TENSORFLOW_INDEX, StoredWeight, read_json
from bert_jax.model import BertConfig
from bert_jax.text.conversion import VOCABULARY, read_vocab_file
from bert_jax.text.tokenizer import SETTINGS, read_settings

BERT_CONFIG = "bert_config.json"

_DATA = re.compile(r"\.data-\d{5}-of-\d{5}")
_STATE = "checkpoint"  # the file in which TensorFlow notes the newest checkpoint of a folder

Variables = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each variable by its name."""


def belongs_to(name: str) -> bool:
    """Returns whether a name is that of a checkpoint's file."""
    return name.endswith(TENSORFLOW_INDEX) or _DATA.search(name) is not None


def prefix_name(name: str) -> str:
    """Returns the prefix of a checkpoint from the name of one of its files, or from the prefix itself."""
    return _DATA.sub("", name.removesuffix(TENSORFLOW_INDEX).removesuffix(".meta"))


def choose_prefix(folder: epath.Path, indices: Sequence[str]) -> epath.Path:
    """Returns the prefix of a folder's only checkpoint, or of the one that the file `checkpoint` notes.

    `indices` are the names of the index files. InputError if that leaves several.
    """
    state = (folder / _STATE).read_text() if len(indices) > 1 and (folder / _STATE).exists() else ""
    noted = re.search(r'^model_checkpoint_path: "(?:.*/)?(.*)"', state, re.MULTILINE)
    name = f"{noted[1]}{TENSORFLOW_INDEX}" if noted else indices[0]
    if name not in indices or (len(indices) > 1 and not noted):
        newest = folder / prefix_name(indices[-1])
        raise InputError(f"{folder}: found {len(indices)} checkpoints; give one of them, such as {newest}")
    return folder / prefix_name(name)


def read(
    prefix: epath.Path, *, lowercase: bool | None = None, layers: Sequence[int] | None = None, drop: Sequence[str] = ()
) -> ForeignCheckpoint:
    """Reads the checkpoint `prefix`, with `bert_config.json` and `vocab.txt` in its folder.

    `hidden_act` "gelu" is read as "gelu_new": it is the tanh form in the code that wrote these checkpoints. Slots of
    optimizers are skipped. `lowercase` None takes `do_lower_case` of `tokenizer_config.json`, or the case in the
    folder's name. For `layers` and `drop` see `import_checkpoint`.

    Raises InputError if a file is missing, TensorFlow is not installed, the case is unknown, or a weight of BERT is
    missing, unexpected or of another shape.
    """
    folder = prefix.parent
    for name in (BERT_CONFIG, VOCABULARY):
        if not (folder / name).exists():
            raise InputError(f"{folder}: {name} not found; copy it from the source of the checkpoint")
    path = folder / BERT_CONFIG
    values = read_json(path)
    size = values.get("hidden_size", BertConfig().hidden_size)
    if values.get("embedding_size", size) != size:
        raise InputError(f"{path}: embedding_size={values['embedding_size']}: expected hidden_size={size}, as of BERT")
    if values.get("hidden_act") == "gelu":
        values = {**values, "hidden_act": "gelu_new"}
    config = bert_config(path, values)
    tokenizer = read_vocab_file(folder / VOCABULARY, _case(folder, lowercase))
    variables, reader = _open(prefix)
    weights = {}
    for name, other in canonical_names([*variables], config).items():
        shape, dtype = variables[name]
        weights[other] = _weight(prefix, name, flat_shape(other, shape, config), dtype, partial(reader, name))
    weights = drop_weights(prefix, weights, drop)
    return assemble(path, config, tokenizer, weights, layers=layers)


def _weight(
    prefix: epath.Path, name: str, shape: tuple[int, ...], dtype: str, read_variable: Callable[[], np.ndarray]
) -> StoredWeight:
    """Returns a variable of a flat `shape` as a weight; a kernel is [out, in] in `transformers`."""
    short = name.removesuffix(VALUE)
    is_kernel = short.endswith("/kernel")

    def value() -> np.ndarray:
        flat = read_variable().reshape(shape)
        return flat.T if is_kernel else flat

    return StoredWeight(prefix, short, shape[::-1] if is_kernel else shape, dtype, value)


def _case(folder: epath.Path, lowercase: bool | None) -> bool:
    """Returns whether text is lowercased, from the option, the tokenizer's settings or the folder's name."""
    stated = read_settings(folder).get("do_lower_case") if lowercase is None else lowercase
    named = re.search(r"(^|[^a-z])(un)?cased([^a-z]|$)", folder.name.lower())
    if isinstance(stated, bool):
        return stated
    if named:
        return named[2] is not None
    raise InputError(
        f"{folder}: unknown case: neither do_lower_case in {SETTINGS} nor the folder's name says it; write "
        f'{{"do_lower_case": true}} or false to {SETTINGS}, or give --cased or --uncased to bert-jax import'
    )


def _open(prefix: epath.Path) -> tuple[Variables, Callable[[str], np.ndarray]]:
    """Returns the variables without training state, and a function that reads one. InputError for a damaged file."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise InputError(
            f"{prefix}: reading a TensorFlow checkpoint requires TensorFlow; run: {install_hint('tf')}"
        ) from error

    def damaged(where: str, error: Exception) -> InputError:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        return InputError(f"{prefix}: damaged{where} ({reason}); download it again")

    # LookupError: the index ends too early; MemoryError: it claims more than there is
    damage = (tf.errors.OpError, ValueError, RuntimeError, LookupError, MemoryError)
    try:
        checkpoint = tf.train.load_checkpoint(str(prefix))
    except damage as error:
        raise damaged("", error) from error

    def read_variable(name: str) -> np.ndarray:
        try:
            return np.asarray(checkpoint.get_tensor(name))
        except damage as error:
            raise damaged(f" at {name}", error) from error

    dtypes = checkpoint.get_variable_to_dtype_map()
    shapes = checkpoint.get_variable_to_shape_map()
    variables = {
        name: (tuple(shape), dtypes[name].name) for name, shape in shapes.items() if not is_training_state(name)
    }
    return variables, read_variable
