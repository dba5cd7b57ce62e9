"""Reads text from TensorFlow Datasets without TensorFlow: inputs `tfds:NAME[:SPLIT[:FEATURE]]`.

    tfds:wikipedia/20230601.en                    the feature `text` of the split `train`
    tfds:wikipedia/20230601.en:1.0.0:train[:10%]  a version, and a part of a split in TFDS's own notation
    tfds:pg19:train+validation:book_text          two splits, and another feature

The dataset must already be in TFDS's data directory (`TFDS_DATA_DIR`, else ~/tensorflow_datasets), in ArrayRecord
format: only TensorFlow reads the default, TFRecord, and Parquet requires the whole split in memory. This module
downloads and generates nothing.
"""

import functools
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from bert_jax.data.options import TEXT_FIELD
from bert_jax.errors import InputError, refused
from bert_jax.files.text_files import Utf8, file_bytes

PREFIX = "tfds:"

_INPUT = re.compile(
    r"tfds:(?P<name>\w+(?:/[\w.-]+)?(?::[\d*]+\.[\d*]+\.[\d*]+)?)"  # dataset/config:1.2.3
    r"(?::(?P<split>(?:[^:\[\]]|\[[^\[\]]*\])*)"  # the colon of train[:10%] is inside brackets
    r"(?::(?P<feature>[^:]+))?)?"
)


def is_tfds(path: str) -> bool:
    """Returns True for an input that is a TFDS dataset."""
    return path.startswith(PREFIX)


def parse(path: str, feature: str = TEXT_FIELD) -> tuple[str, str, str]:
    """Returns name, split (by default `train`) and feature (by default `feature`) of `tfds:NAME[:SPLIT[:FEATURE]]`.

    Raises InputError for an input of another form.
    """
    match = _INPUT.fullmatch(path)
    if match is None:
        raise InputError(f"{path}: expected tfds:NAME, tfds:NAME:SPLIT or tfds:NAME:SPLIT:FEATURE")
    return match["name"], match["split"] or "train", match["feature"] or feature


def examples(path: str) -> tuple[int, int]:
    """Returns the number of examples of an input, and their bytes on disk.

    Raises:
      InputError: the dataset is not prepared, is not in ArrayRecord format, or lacks the split, the text feature, or
        some of its files.
    """
    name, split, feature = parse(path)
    info = _open(name).info
    known = [key for key, value in info.features.items() if value.shape == () and value.np_dtype == np.object_]
    if feature not in known:
        raise InputError(f"{path}: unknown text feature {feature!r}; expected one of: {', '.join(sorted(known))}")
    with refused(f"{path}: cannot be read"):  # the message lists the splits or refers to their notation
        files = info.splits[split].file_instructions
    total = sum(file.take for file in files)
    return total, sum(file_bytes(str(file.filename)) * file.take // file.examples_in_shard for file in files)


def texts(path: str, start: int, end: int | None, utf8: Utf8) -> Iterator[str]:
    """Yields the text of each of the examples [start, end) of a split; None is the last.

    Raises:
      InputError: as `examples`; or, with the index, an unreadable example or invalid UTF-8.
    """
    import tensorflow_datasets as tfds

    name, split, feature = parse(path)
    builder = _open(name)
    with refused(f"{path}: cannot be read"):
        records = builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
    decoder = tfds.features.FeaturesDict({feature: builder.info.features[feature]})
    for number in range(len(records))[start:end]:
        with refused(f"{path}: example {number}: cannot be read"):
            value = decoder.deserialize_example_np(records[number])[feature]
            if value is not None:  # of an optional feature
                text = utf8.decode(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
        if value is not None:
            yield text


@functools.lru_cache(maxsize=16)
def _open(name: str) -> Any:
    """Opens a dataset's files as a `tfds.core.DatasetBuilder`, without its code, which may need TensorFlow."""
    import tensorflow_datasets as tfds

    fix = f"; set TFDS_DATA_DIR, or run tfds build {name} --file_format=array_record where TensorFlow is"
    with refused(
        f"{PREFIX}{name}: cannot be read{fix}"
    ):  # not found, an invalid name, another format, or damaged metadata
        builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=os.environ.get("TFDS_DATA_DIR") or None)
        builder.info.set_file_format("array_record", override=True, override_if_initialized=True)
    return builder
