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
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from etils import epath

from bert_jax.data.corpora.corpus_options import TEXT_FIELD
from bert_jax.errors import InputError
from bert_jax.files.text_files import Utf8, file_bytes

PREFIX = "tfds:"
EXAMPLE = "tfds:wikipedia/20230601.en:train:text"

_INPUT = re.compile(
    r"tfds:(?P<name>\w+(?:/[\w.-]+)?(?::[\d*]+\.[\d*]+\.[\d*]+)?)"  # dataset/config:1.2.3
    r"(?::(?P<split>(?:[^:\[\]]|\[[^\[\]]*\])*)"  # the colon of train[:10%] is inside brackets
    r"(?::(?P<feature>[^:]+))?)?"
)


@dataclass(frozen=True)
class _Source:
    name: str
    split: str
    feature: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}:{self.split}" + (f":{self.feature}" if self.feature else "")


def is_tfds(path: str) -> bool:
    """Returns True for an input that is a TFDS dataset."""
    return path.startswith(PREFIX)


def normalize(path: str, feature: str) -> str:
    """Returns `tfds:NAME:SPLIT:FEATURE`, with the defaults `train` and `feature`.

    Raises:
      InputError: the input is not of the form `tfds:NAME[:SPLIT[:FEATURE]]`.
    """
    return str(_parse(path, feature))


def _parse(path: str, feature: str = TEXT_FIELD) -> _Source:
    match = _INPUT.fullmatch(path)
    if match is None:
        raise InputError(f"{path}: expected tfds:NAME, tfds:NAME:SPLIT or tfds:NAME:SPLIT:FEATURE, as in {EXAMPLE}")
    return _Source(match["name"], match["split"] or "train", match["feature"] or feature)


def slices(path: str, slice_bytes: int) -> list[tuple[int, int, int]]:
    """Returns (start, end, bytes) of slices of about `slice_bytes` on disk, which cover the examples of an input.

    Raises:
      InputError: the dataset is not prepared, is not in ArrayRecord format, or lacks the split, examples in it, the
        text feature, or some of its files.
    """
    source = _parse(path)
    builder = _builder(source)
    _check_feature(source, builder)
    files = _files(source, builder)
    total = sum(file.take for file in files)
    if total <= 0:
        raise InputError(f"{source}: split {source.split!r} has no examples; use another split")
    size = sum(file_bytes(str(file.filename)) * file.take // file.examples_in_shard for file in files)
    count = max(1, min(total, -(-size // slice_bytes)))
    cuts = [(total * i // count, size * i // count) for i in range(count + 1)]
    return [(start, end, after - before) for (start, before), (end, after) in pairwise(cuts)]


def version(path: str) -> str:
    """Returns the full name of a dataset, such as `wikipedia/20230601.en/1.0.0`."""
    return str(_builder(_parse(path)).info.full_name)


def texts(path: str, start: int, end: int | None, utf8: Utf8) -> Iterator[tuple[str, str]]:
    """Yields ("example N", text) of the examples [start, end) of a split; None is the last.

    Raises:
      InputError: as `slices`; or, with the index, an unreadable example or invalid UTF-8.
    """
    import tensorflow_datasets as tfds

    source = _parse(path)
    features = _builder(source).info.features
    only = tfds.features.FeaturesDict({source.feature: features[source.feature]})
    for number, values in _read(source, start, end, only):
        value = values[source.feature]
        if value is None:  # a missing optional feature
            continue
        try:
            text = utf8.decode(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
        except ValueError as error:
            raise InputError(f"{source}: example {number}: {error}") from error
        yield f"example {number}", text


def examples(dataset: str, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (index, features by name) of all examples of a split; text is bytes, a class label an integer.

    Args:
      dataset: `tfds:NAME`.
      split: in TFDS's own notation.

    Raises:
      InputError: as `slices`, except for the text feature; or, with the index, an unreadable example.
    """
    source = replace(_parse(f"{dataset}:{split}"), feature="")  # all of them
    return _read(source, 0, None, _builder(source).info.features)


def _read(source: _Source, start: int, end: int | None, features: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    import tensorflow_datasets as tfds

    builder = _builder(source)
    _files(source, builder)
    records = builder.as_data_source(source.split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
    for number in range(len(records))[start:end]:
        try:
            values = features.deserialize_example_np(records[number])
        except Exception as error:  # ArrayRecord and TFDS raise various classes for damaged files
            raise InputError(
                f"{source}: example {number} cannot be read ({_first_line(error)}); prepare the dataset again"
            ) from error
        yield number, values


def _files(source: _Source, builder: Any) -> Any:
    """Returns the files of a split. Raises InputError for an unknown split."""
    try:
        return builder.info.splits[source.split].file_instructions
    except Exception as error:  # of various classes; the message lists the splits or refers to their notation
        raise InputError(f"{source}: {_first_line(error)}") from error


def _builder(source: _Source) -> Any:
    return _open(source.name, os.environ.get("TFDS_DATA_DIR") or None)


@functools.lru_cache(maxsize=16)
def _open(name: str, data_dir: str | None) -> Any:
    """Opens a dataset's files as a `tfds.core.DatasetBuilder`, without its code, which may need TensorFlow."""
    import tensorflow_datasets as tfds

    try:
        builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        where = data_dir or "~/tensorflow_datasets"
        option = f" --data_dir={data_dir}" if data_dir else ""
        raise InputError(
            f"{PREFIX}{name}: not found in {where}{_alternatives(name, where)}; set TFDS_DATA_DIR, or prepare it "
            f"on a machine with TensorFlow: tfds build {name} --file_format=array_record{option}"
        ) from error
    except Exception as error:  # an invalid name, or metadata that is damaged or too old
        raise InputError(f"{PREFIX}{name}: cannot be opened ({_first_line(error)}); prepare it again") from error
    formats = {file_format.value for file_format in builder.info.available_file_formats()}
    if "array_record" not in formats:
        raise InputError(
            f"{PREFIX}{name}: got format {', '.join(sorted(formats))}, expected array_record; convert it on a "
            f"machine with TensorFlow: tfds convert_format --dataset_version_dir={builder.data_dir} "
            "--out_file_format=array_record"
        )
    builder.info.set_file_format("array_record", override=True, override_if_initialized=True)
    return builder


def _alternatives(name: str, data_dir: str) -> str:
    """Lists other configs and versions of a dataset, one of which is usually intended."""
    root = epath.Path(data_dir).expanduser()
    dataset = root / re.split("[/:]", name)[0]
    infos = [*dataset.glob("*/dataset_info.json"), *dataset.glob("*/*/dataset_info.json")]
    found = sorted(f"{PREFIX}{info.parent.parent.relative_to(root)}:{info.parent.name}" for info in infos)
    return f", but found {', '.join(found)}" if found else ""


def _check_feature(source: _Source, builder: Any) -> None:
    import tensorflow_datasets as tfds

    features = builder.info.features
    items = features.items() if isinstance(features, tfds.features.FeaturesDict) else ()
    known = sorted(name for name, feature in items if feature.shape == () and feature.np_dtype == np.object_)
    if source.feature not in known:
        raise InputError(
            f"{source}: unknown text feature {source.feature!r}; expected one of: {', '.join(known) or 'none'}"
        )


def _first_line(error: Exception) -> str:
    return f"{error}".strip().partition("\n")[0].rstrip(".")
