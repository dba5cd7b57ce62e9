"""Text out of TensorFlow Datasets, read without TensorFlow: the inputs `tfds:NAME[:SPLIT[:FEATURE]]`.

    tfds:wikipedia/20230601.en                    the feature `text` of the split `train`
    tfds:wikipedia/20230601.en:1.0.0:train[:10%]  a version, and a part of a split in TFDS's own notation
    tfds:pg19:train+validation:book_text          two splits, and another feature

The dataset has to be there already, in TFDS's data directory (`TFDS_DATA_DIR`, else ~/tensorflow_datasets), and as
ArrayRecord: the default, TFRecord, is read by TensorFlow alone, and Parquet by holding the whole split in memory.
Nothing is downloaded or generated here.
"""

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from bert_jax.errors import InputError
from bert_jax.files.line_reader import file_bytes

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
        return f"{PREFIX}{self.name}:{self.split}:{self.feature}"


def is_tfds(path: str) -> bool:
    """Whether an input names a dataset of TFDS."""
    return path.startswith(PREFIX)


def normalize(path: str) -> str:
    """`tfds:NAME:SPLIT:FEATURE` with split and feature, `train` and `text` where they were left out.

    Raises:
      InputError: what is written is not of the form `tfds:NAME[:SPLIT[:FEATURE]]`.
    """
    return str(_parse(path))


def _parse(path: str) -> _Source:
    match = _INPUT.fullmatch(path)
    if match is None:
        raise InputError(f"{path}: write tfds:NAME, tfds:NAME:SPLIT or tfds:NAME:SPLIT:FEATURE, as in {EXAMPLE}")
    return _Source(match["name"], match["split"] or "train", match["feature"] or "text")


def size(path: str) -> tuple[int, int]:
    """(examples, bytes on disk) of the split that a path names.

    Raises:
      InputError: the dataset is not prepared, not as ArrayRecord, or has no such split, no example in it, no such
        text feature, or not all of its files.
    """
    source = _parse(path)
    builder = _builder(source)
    _check_feature(source, builder)
    try:
        files = builder.info.splits[source.split].file_instructions
    except Exception as error:  # of several kinds; it says which splits there are, or where their notation is explained
        raise InputError(f"{source}: {_first_line(error)}") from error
    examples = sum(file.take for file in files)
    if examples <= 0:
        raise InputError(f"{source}: there is no example in {source.split!r}; name another split")
    return examples, sum(file_bytes(str(file.filename)) * file.take // file.examples_in_shard for file in files)


def fingerprint(path: str) -> str:
    """Stands for what the files of a split hold now."""
    source = _parse(path)
    files = _builder(source).info.splits[source.split].file_instructions
    stats = [(file.filename, file.skip, file.take, epath.Path(file.filename).stat()) for file in files]
    return " ".join(f"{name} {skip} {take} {stat.length} {stat.mtime}" for name, skip, take, stat in stats)


def texts(path: str, start: int, end: int, errors: str) -> Iterator[tuple[int, str]]:
    """(number, text) of the examples [start, end), numbered from 0 in the split; `errors` as in `bytes.decode`.

    Raises:
      InputError: as `size`, or with the example's number: one that cannot be read, or text that is not UTF-8.
    """
    import tensorflow_datasets as tfds

    source = _parse(path)
    builder = _builder(source)
    raw = tfds.decode.DeserializeMethod.RAW_BYTES
    records = builder.as_data_source(source.split, deserialize_method=raw)
    feature = tfds.features.FeaturesDict({source.feature: builder.info.features[source.feature]})  # and no other
    for number in range(start, end):
        try:
            value = feature.deserialize_example_np(records[number])[source.feature]
        except Exception as error:  # ArrayRecord and TFDS raise what they like for damaged files
            raise InputError(
                f"{source}: example {number} cannot be read ({_first_line(error)}); prepare the dataset again"
            ) from error
        if value is not None:  # as where a feature is optional
            yield number, _decode(value, source, number, errors)


def examples(dataset: str, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, features by name) of all examples of a split, numbered from 0; text is bytes, a class is a number.

    Args:
      dataset: `tfds:NAME`.
      split: in TFDS's own notation.

    Raises:
      InputError: as `size`, but for the text feature, or with the number of an example that cannot be read.
    """
    import tensorflow_datasets as tfds

    source = _parse(f"{dataset}:{split}")
    builder = _builder(source)
    try:
        records = builder.as_data_source(source.split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
    except Exception as error:  # of several kinds; it says which splits there are
        raise InputError(f"{dataset}:{split}: {_first_line(error)}") from error
    for number in range(len(records)):
        try:
            yield number, builder.info.features.deserialize_example_np(records[number])
        except Exception as error:  # ArrayRecord and TFDS raise what they like for damaged files
            raise InputError(
                f"{dataset}:{split}: example {number} cannot be read ({_first_line(error)}); prepare the dataset again"
            ) from error


def _decode(value: bytes | str, source: _Source, number: int, errors: str) -> str:
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source}: example {number} is not valid UTF-8 (byte 0x{data[error.start]:02x}); "
            "mend it or pass --errors replace"
        ) from error


def _builder(source: _Source) -> Any:
    return _open(source.name, os.environ.get("TFDS_DATA_DIR") or None)


@functools.lru_cache(maxsize=16)
def _open(name: str, data_dir: str | None) -> Any:
    """The `tfds.core.DatasetBuilder` of a dataset's files; its code, which may need TensorFlow, is left alone."""
    import tensorflow_datasets as tfds

    try:
        builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        where = data_dir or "~/tensorflow_datasets"
        option = f" --data_dir={data_dir}" if data_dir else ""
        raise InputError(
            f"{PREFIX}{name}: not prepared in {where}{_what_is_there(name, where)}; set TFDS_DATA_DIR, or prepare it "
            f"where TensorFlow is installed: tfds build {name} --file_format=array_record{option}"
        ) from error
    except Exception as error:  # a name that TFDS cannot parse, metadata that is damaged or too old
        raise InputError(f"{PREFIX}{name}: cannot be opened ({_first_line(error)}); prepare it again") from error
    formats = {file_format.value for file_format in builder.info.available_file_formats()}
    if "array_record" not in formats:
        raise InputError(
            f"{PREFIX}{name}: prepared as {', '.join(sorted(formats))} and not as array_record; convert it where "
            f"TensorFlow is installed: tfds convert_format --dataset_version_dir={builder.data_dir} "
            "--out_file_format=array_record"
        )
    builder.info.set_file_format("array_record", override=True, override_if_initialized=True)
    return builder


def _what_is_there(name: str, data_dir: str) -> str:
    """Other configs and versions of a dataset: most often one of them is meant."""
    root = epath.Path(data_dir).expanduser()
    dataset = root / re.split("[/:]", name)[0]
    infos = [*dataset.glob("*/dataset_info.json"), *dataset.glob("*/*/dataset_info.json")]
    found = sorted(f"{PREFIX}{info.parent.parent.relative_to(root)}:{info.parent.name}" for info in infos)
    return f", but {', '.join(found)} is" if found else ""


def _check_feature(source: _Source, builder: Any) -> None:
    import tensorflow_datasets as tfds

    features = builder.info.features
    named = features.items() if isinstance(features, tfds.features.FeaturesDict) else ()
    known = sorted(name for name, feature in named if feature.shape == () and feature.np_dtype == np.object_)
    if source.feature not in known:
        raise InputError(f"{source}: no text feature {source.feature!r}; there are: {', '.join(known) or 'none'}")


def _first_line(error: Exception) -> str:
    return f"{error}".strip().partition("\n")[0].rstrip(".")
