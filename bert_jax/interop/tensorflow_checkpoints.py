"""Reads TensorFlow checkpoints of BERT: TF1 as google-research/bert and MLPerf released them, and TF2 objects.

TF1 code names variables `bert/encoder/layer_0/attention/self/query/kernel`. tensorflow/models (official/nlp, TF2) saves
objects: `encoder/layer_with_weights-4/_attention_layer/_query_dense/kernel` of a Keras graph, or
`encoder/_transformer_layers/0/_attention_layer/_query_dense/kernel` of its later encoders. A kernel is [in, out] in
both, with a separate axis for heads in TF2.

TensorFlow reads the files. It is an extra (`tf`), and is imported here alone.
"""

import logging
import os
import re
from collections.abc import Sequence
from functools import partial

import numpy as np
from etils import epath

from bert_jax.errors import InputError, install_hint
from bert_jax.interop.weights import StoredWeight
from bert_jax.model import BertConfig

log = logging.getLogger(__name__)

INDEX = ".index"
"""The end of the name of a checkpoint's index."""
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
"""The end of the name of a variable that TF2 saves as part of an object."""

_DATA = re.compile(r"\.data-\d{5}-of-\d{5}")
_SLOTS = re.compile(
    r"(^|/)(adam_[mv]|Adam(_1)?|lamb_[mv]|LAMB(_1)?|Momentum|ExponentialMovingAverage|optimizer|\.OPTIMIZER_SLOT"
    r"|_CHECKPOINTABLE_OBJECT_GRAPH|save_counter|global_step|train_step|beta[12]_power|loss_scale|good_steps"
    r"|current_loss_scale)(/|$)"
)
_TF1 = (  # whose names are those of `transformers`, with dots instead of slashes, but for these
    (r"\.layer_(\d+)\.", r".layer.\1."),
    (r"_embeddings$", r"_embeddings.weight"),
    (r"^cls\.predictions\.output_bias$", r"cls.predictions.bias"),
    (r"^cls\.seq_relationship\.output_weights$", r"cls.seq_relationship.weight"),
    (r"^cls\.seq_relationship\.output_bias$", r"cls.seq_relationship.bias"),
)
_LAYER, _IN_LAYER = r"_transformer_layers/(\d+)/", r"bert.encoder.layer.\1."
_TF2 = (  # ends of names, in an encoder and in heads, whatever holds them
    (_LAYER + r"_attention_layer/_(query|key|value)_dense/(\w+)", _IN_LAYER + r"attention.self.\2.\3"),
    (_LAYER + r"(?:_attention_layer/_output_dense|_attention_output_dense)/(\w+)",
     _IN_LAYER + r"attention.output.dense.\2"),
    (_LAYER + r"_attention_layer_norm/(\w+)", _IN_LAYER + r"attention.output.LayerNorm.\2"),
    (_LAYER + r"_intermediate_dense/(\w+)", _IN_LAYER + r"intermediate.dense.\2"),
    (_LAYER + r"_output_dense/(\w+)", _IN_LAYER + r"output.dense.\2"),
    (_LAYER + r"_output_layer_norm/(\w+)", _IN_LAYER + r"output.LayerNorm.\2"),
    (r"_embedding_layer/embeddings", "bert.embeddings.word_embeddings.weight"),
    (r"_position_embedding_layer/embeddings", "bert.embeddings.position_embeddings.weight"),
    (r"_type_embedding_layer/embeddings", "bert.embeddings.token_type_embeddings.weight"),
    (r"_embedding_norm_layer/(\w+)", r"bert.embeddings.LayerNorm.\1"),
    (r"_pooler_layer/(\w+)", r"bert.pooler.dense.\1"),
    (r"masked_lm/dense/(\w+)", r"cls.predictions.transform.dense.\1"),
    (r"masked_lm/layer_norm/(\w+)", r"cls.predictions.transform.LayerNorm.\1"),
    (r"masked_lm/(?:output_bias\.Sbias|output_bias/bias|bias|_bias)", "cls.predictions.bias"),
    (r"masked_lm/embedding_table", "bert.embeddings.word_embeddings.weight"),
    (r"(?:next_sentence\.\.pooler_dense|classification_heads/0/dense)/(\w+)", r"next_sentence.dense.\1"),
    (r"(?:next_sentence\.\.|classification_heads/0/)out_proj/(\w+)", r"cls.seq_relationship.\1"),
)  # fmt: skip
_GRAPH = ("_embedding_layer", "_position_embedding_layer", "_type_embedding_layer", "_embedding_norm_layer")
_ENDINGS = {"kernel": "weight", "gamma": "weight", "beta": "bias"}


def prefix_name(name: str) -> str:
    """Returns the prefix of a checkpoint from the name of one of its files, or from the prefix itself."""
    return _DATA.sub("", name.removesuffix(INDEX).removesuffix(".meta"))


def open_variables(prefix: epath.Path, config: BertConfig) -> dict[str, StoredWeight]:
    """Returns the weights of the checkpoint `prefix` by their names in BertForPreTraining, or their own if it has none.

    Slots of optimizers are skipped. Raises InputError for a damaged file, two variables of one weight, and if
    TensorFlow is not installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise InputError(f"{prefix}: requires TensorFlow, which reads its checkpoints; {install_hint('tf')}") from error
    # LookupError: the index ends too early; MemoryError: it claims more than there is
    damage = (tf.errors.OpError, ValueError, RuntimeError, LookupError, MemoryError)

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        try:
            flat = np.asarray(checkpoint.get_tensor(name)).reshape(shape)
        except damage as error:
            raise InputError(f"{prefix}: damaged at {name} ({str(error)[:80]}); download it again") from error
        return flat.T if _is_kernel(name) else flat

    try:
        checkpoint = tf.train.load_checkpoint(str(prefix))
        dtypes, shapes = checkpoint.get_variable_to_dtype_map(), checkpoint.get_variable_to_shape_map()
    except damage as error:
        raise InputError(f"{prefix}: damaged ({str(error)[:80]}); download it again") from error
    weights: dict[str, StoredWeight] = {}
    for name, other in canonical_names([name for name in shapes if not _SLOTS.search(name)], config).items():
        if other in weights:
            raise InputError(f"{prefix}: {weights[other].name} and {name} are two variables of one weight, {other}")
        shape = _flat_shape(other, tuple(shapes[name]), config)
        weights[other] = StoredWeight(
            prefix, name.removesuffix(VALUE), shape[::-1] if _is_kernel(name) else shape, dtypes[name].name,
            partial(read, name, shape),
        )  # fmt: skip
    return weights


def canonical_names(names: Sequence[str], config: BertConfig) -> dict[str, str]:
    """Returns the name in BertForPreTraining of each variable, and its own name if it is no part of a BERT.

    TF2 may have a second pooler in the head of next sentences; only this one is trained, and the encoder's is absent.
    """
    if not any(name.endswith(VALUE) for name in names):
        return {name: _tf1_name(name) for name in names}
    result = {name: _tf2_name(name.removesuffix(VALUE), config) for name in names}
    if any(other.startswith("next_sentence.dense.") for other in result.values()):
        log.info("The pooler is that of the next-sentence head, which is trained, and not the encoder's")
        result = {name: other for name, other in result.items() if not other.startswith("bert.pooler.")}
        result = {name: other.replace("next_sentence.dense.", "bert.pooler.dense.") for name, other in result.items()}
    return result


def _is_kernel(name: str) -> bool:
    return name.removesuffix(VALUE).endswith("/kernel")


def _flat_shape(name: str, shape: tuple[int, ...], config: BertConfig) -> tuple[int, ...]:
    """Returns the shape of a weight, of this name in `transformers`, with one axis for heads and their size."""
    if ".attention." in name and len(shape) == (2 if name.endswith(".bias") else 3):
        for axis in range(len(shape) - 1):
            if shape[axis : axis + 2] == (config.num_attention_heads, config.head_size):
                return (*shape[:axis], config.hidden_size, *shape[axis + 2 :])
    return shape


def _tf1_name(name: str) -> str:
    result = name.replace("/", ".")
    for pattern, other in _TF1:
        result = re.sub(pattern, other, result)
    return _with_ending(result)


def _tf2_name(path: str, config: BertConfig) -> str:
    if found := re.fullmatch(r"(.*/)?layer_with_weights-(\d+)/(.*)", path):  # of a Keras graph
        number = int(found[2])
        numbered = f"_transformer_layers/{number - 4}" if number < config.num_hidden_layers + 4 else "_pooler_layer"
        path = f"{found[1] or ''}{_GRAPH[number] if number < 4 else numbered}/{found[3]}"
    for pattern, other in _TF2:
        if match := re.fullmatch(rf"(?:.*/)?{pattern}", path):
            return _with_ending(match.expand(other))
    return path


def _with_ending(name: str) -> str:
    beginning, dot, ending = name.rpartition(".")
    return f"{beginning}{dot}{_ENDINGS.get(ending, ending)}"
