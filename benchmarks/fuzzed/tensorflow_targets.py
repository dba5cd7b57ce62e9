"""The reader of TensorFlow's checkpoints as a target of the fuzz campaign."""

import functools
import tempfile
from pathlib import Path

import numpy as np

PREFIX = "uncased.ckpt"


@functools.cache
def checkpoint(vocab_size: int, hidden: int, between: int, positions: int) -> dict[str, bytes]:
    """Returns the files of a TF1 checkpoint of one layer, by name."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=shape).astype(np.float32)
              for name, shape in _shapes(vocab_size, hidden, between, positions).items()}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        tf.raw_ops.SaveV2(
            prefix=f"{folder}/{PREFIX}", tensor_names=list(arrays), shape_and_slices=[""] * len(arrays),
            tensors=[tf.constant(value) for value in arrays.values()],
        )  # fmt: skip
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _shapes(vocab_size: int, hidden: int, between: int, positions: int) -> dict[str, tuple[int, ...]]:
    layer = "bert/encoder/layer_0/"
    dense = {
        **{f"{layer}attention/self/{name}": (hidden, hidden) for name in ("query", "key", "value")},
        f"{layer}attention/output/dense": (hidden, hidden), f"{layer}intermediate/dense": (hidden, between),
        f"{layer}output/dense": (between, hidden), "bert/pooler/dense": (hidden, hidden),
        "cls/predictions/transform/dense": (hidden, hidden),
    }  # fmt: skip
    norms = ("bert/embeddings", f"{layer}attention/output", f"{layer}output", "cls/predictions/transform")
    return {
        "bert/embeddings/word_embeddings": (vocab_size, hidden),
        "bert/embeddings/position_embeddings": (positions, hidden),
        "bert/embeddings/token_type_embeddings": (2, hidden),
        "cls/predictions/output_bias": (vocab_size,),
        "cls/seq_relationship/output_weights": (2, hidden),
        "cls/seq_relationship/output_bias": (2,),
        **{f"{name}/kernel": shape for name, shape in dense.items()},
        **{f"{name}/bias": shape[1:] for name, shape in dense.items()},
        **{f"{name}/LayerNorm/{part}": (hidden,) for name in norms for part in ("gamma", "beta")},
    }
