"""Reads TensorFlow checkpoints of BERT, as google-research/bert and MLPerf released them.

They name variables `bert/encoder/layer_0/attention/self/query/kernel`, whose kernels are [in, out].

TensorFlow reads the files. It is an extra (`tf`), and is imported here alone.
"""

import os
import re
from functools import partial

import numpy as np
from etils import epath

from bert_jax.errors import InputError, install_hint
from bert_jax.interop.weights import StoredWeight

INDEX = ".index"
"""The end of the name of a checkpoint's index."""

_DATA = re.compile(r"\.data-\d{5}-of-\d{5}")
_SLOTS = re.compile(
    r"(^|/)(adam_[mv]|Adam(_1)?|lamb_[mv]|LAMB(_1)?|Momentum|ExponentialMovingAverage|global_step|beta[12]_power"
    r"|loss_scale|good_steps|current_loss_scale)(/|$)"
)
_NAMES = (  # whose names are those of `transformers`, with dots instead of slashes, but for these
    (r"\.layer_(\d+)\.", r".layer.\1."),
    (r"_embeddings$", r"_embeddings.weight"),
    (r"^cls\.predictions\.output_bias$", r"cls.predictions.bias"),
    (r"^cls\.seq_relationship\.output_weights$", r"cls.seq_relationship.weight"),
    (r"^cls\.seq_relationship\.output_bias$", r"cls.seq_relationship.bias"),
)
_ENDINGS = {"kernel": "weight", "gamma": "weight", "beta": "bias"}


def prefix_name(name: str) -> str:
    """Returns the prefix of a checkpoint from the name of one of its files, or from the prefix itself."""
    return _DATA.sub("", name.removesuffix(INDEX).removesuffix(".meta"))


def open_variables(prefix: epath.Path) -> dict[str, StoredWeight]:
    """Returns the weights of the checkpoint `prefix` by their names in BertForPreTraining, or their own if it has none.

    Slots of optimizers are skipped. Raises InputError for a damaged file, and if TensorFlow is not installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise InputError(f"{prefix}: requires TensorFlow, which reads its checkpoints; {install_hint('tf')}") from error
    weights: dict[str, StoredWeight] = {}
    try:
        checkpoint = tf.train.load_checkpoint(str(prefix))
        for name in checkpoint.get_variable_to_shape_map():
            if not _SLOTS.search(name):
                value = np.asarray(checkpoint.get_tensor(name))
                value = value.T if name.endswith("/kernel") else value
                weights[_canonical_name(name)] = StoredWeight(
                    prefix, name, value.shape, value.dtype.name, partial(np.asarray, value)
                )
    # LookupError: the index ends too early; MemoryError: it claims more than there is
    except (tf.errors.OpError, ValueError, RuntimeError, LookupError, MemoryError) as error:
        raise InputError(f"{prefix}: damaged ({str(error)[:80]}); download it again") from error
    return weights


def _canonical_name(name: str) -> str:
    """Returns the name in BertForPreTraining, and the variable's own, with dots, if it is no part of a BERT."""
    result = name.replace("/", ".")
    for pattern, other in _NAMES:
        result = re.sub(pattern, other, result)
    beginning, dot, ending = result.rpartition(".")
    return f"{beginning}{dot}{_ENDINGS.get(ending, ending)}"
