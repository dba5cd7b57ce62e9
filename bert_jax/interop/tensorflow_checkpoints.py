"""Import of TensorFlow checkpoints of BERT: TF1 as google-research/bert and MLPerf released them, and TF2 objects.

TensorFlow reads the files. It is an extra (`tf`), and is imported here alone.
"""

import logging
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from etils import epath

from bert_jax.errors import InputError
from bert_jax.extras import install_hint
from bert_jax.interop.huggingface_reading import Source, assemble, bert_config, check_vocabulary
from bert_jax.interop.tensorflow_names import is_training_state, weights_of
from bert_jax.interop.weight_files import finite, read_json
from bert_jax.model import BertConfig
from bert_jax.text.conversion import VOCABULARY, read_vocab_file
from bert_jax.text.tokenizer import SETTINGS, read_settings
from bert_jax.text.wordpiece import wordpiece_tokenizer

log = logging.getLogger(__name__)

BERT_CONFIG = "bert_config.json"
INDEX = ".index"
DATA = re.compile(r"\.data-\d{5}-of-\d{5}")

_STATE = "checkpoint"  # the file in which TensorFlow notes the newest checkpoint of a folder
_DTYPES = ("float32", "float16", "bfloat16")


def find_prefix(source: epath.Path) -> epath.Path | None:
    """Returns the prefix of the checkpoint that `source` names: a folder, a prefix, or one of its files; None if none.

    In a folder with several it is the one noted in the file `checkpoint`. Raises InputError if that leaves several.
    """
    if not source.is_dir():
        name = prefix_name(source.name)
        prefix = source.parent / name
        return prefix if (source.parent / f"{name}{INDEX}").exists() else None
    found = sorted(path.name.removesuffix(INDEX) for path in source.iterdir() if path.name.endswith(INDEX))
    if len(found) > 1:
        state = (source / _STATE).read_text() if (source / _STATE).exists() else ""
        noted = re.search(r'^model_checkpoint_path: "(.*)"', state, re.MULTILINE)
        name = epath.Path(noted[1]).name if noted else ""
        if name not in found:
            raise InputError(
                f"{source}: found {len(found)} checkpoints; give one of them, such as {source / found[-1]}"
            )
        found = [name]
    return source / found[0] if found else None


def prefix_name(name: str) -> str:
    """Returns the prefix of a checkpoint from the name of one of its files, or from the prefix itself."""
    return DATA.sub("", name.removesuffix(INDEX).removesuffix(".meta"))


def read(prefix: epath.Path, *, lowercase: bool | None = None) -> Source:
    """Reads the checkpoint `prefix`, with `bert_config.json` and `vocab.txt` in its folder.

    `hidden_act` "gelu" is read as "gelu_new": it is the tanh form in the code that wrote these checkpoints. Slots of
    optimizers are skipped. `lowercase` None takes `do_lower_case` of `tokenizer_config.json`, or the case in the
    folder's name.

    Raises InputError if a file is missing, TensorFlow is not installed, the case is unknown, or a weight of BERT is
    missing or of another shape.
    """
    folder = prefix.parent
    for name in (BERT_CONFIG, VOCABULARY):
        if not (folder / name).exists():
            raise InputError(f"{folder}: {name} not found; copy it from the source of the checkpoint")
    values = read_json(folder / BERT_CONFIG)
    _check_is_bert(folder / BERT_CONFIG, values)
    if values.get("hidden_act") == "gelu":
        values = {**values, "hidden_act": "gelu_new"}
    config = bert_config(folder / BERT_CONFIG, values)
    tokenizer = wordpiece_tokenizer(read_vocab_file(folder / VOCABULARY), _case(folder, lowercase))
    check_vocabulary(folder / BERT_CONFIG, config, tokenizer)
    shapes, reader = _open(prefix)
    weights, others = weights_of(shapes, reader, config)
    if not weights:
        raise InputError(f"{prefix}: found no variable of BERT, but {', '.join(others[:4]) or 'none at all'}")
    if others:
        log.warning(
            "%s: %d variables are not part of a pre-trained BERT and are dropped: %s%s", prefix, len(others),
            ", ".join(sorted(others)[:4]), " ..." if len(others) > 4 else "",
        )  # fmt: skip
    return assemble(folder / BERT_CONFIG, config, tokenizer, weights, ())


def _check_is_bert(path: epath.Path, values: dict[str, Any]) -> None:
    size = values.get("hidden_size", BertConfig().hidden_size)
    if values.get("embedding_size", size) != size:
        raise InputError(
            f"{path}: embedding_size={values['embedding_size']} is not BERT's: expected hidden_size={size}; ALBERT and "
            "ELECTRA are not supported"
        )


def _case(folder: epath.Path, lowercase: bool | None) -> bool:
    """Returns whether text is lowercased, from the option, the tokenizer's settings or the folder's name."""
    if lowercase is not None:
        return lowercase
    stated = read_settings(folder).get("do_lower_case")
    if isinstance(stated, bool):
        return stated
    name = folder.name.lower()
    if re.search(r"(^|[^a-z])uncased([^a-z]|$)", name):
        return True
    if re.search(r"(^|[^a-z])cased([^a-z]|$)", name):
        return False
    raise InputError(
        f"{folder}: unknown case: neither do_lower_case in {SETTINGS} nor the folder's name says it; write "
        f'{{"do_lower_case": true}} or false to {SETTINGS}, or give --cased or --uncased to bert-jax import'
    )


def _open(prefix: epath.Path) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Returns the shape of each variable, and a function that reads one as fp32. InputError for a damaged file."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise InputError(
            f"{prefix}: reading a TensorFlow checkpoint requires TensorFlow; run: {install_hint('tf')}"
        ) from error
    # LookupError: the index ends too early; MemoryError: it claims more than there is
    damage = (tf.errors.OpError, ValueError, RuntimeError, LookupError, MemoryError)
    try:
        checkpoint = tf.train.load_checkpoint(str(prefix))
    except damage as error:
        raise InputError(f"{prefix}: damaged ({_first_line(error)}); download it again") from error
    dtypes = checkpoint.get_variable_to_dtype_map()

    def read(name: str) -> np.ndarray:
        if dtypes[name].name not in _DTYPES:
            raise InputError(f"{prefix}: {name} has dtype {dtypes[name].name}; expected {', '.join(_DTYPES)}")
        try:
            value = checkpoint.get_tensor(name)
        except damage as error:
            raise InputError(f"{prefix}: damaged at {name} ({_first_line(error)}); download it again") from error
        return finite(prefix, name, np.asarray(value).astype(np.float32))

    shapes = checkpoint.get_variable_to_shape_map()
    return {name: tuple(shape) for name, shape in shapes.items() if not is_training_state(name)}, read


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
