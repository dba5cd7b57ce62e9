"""Gives a prepared dataset the evaluation sequences of TFRecord files, such as the 10,000 of MLPerf.

    python launch/tfrecord_eval.py DATASET eval_10k [FILE ...]

The files are those of `create_pretraining_data.py` of google-research/bert; their checksums are not verified. Their
masks are undone: an evaluation of bert_jax draws its own. DATASET must be prepared with the same vocabulary, with
sequences of as many tokens, with pairs for next sentences, and without an eval split (`bert-jax prepare
--eval_fraction 0`).
"""

import argparse
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bert_jax.data.dataset import PreparedDataset, SplitInfo, array_bytes, digest, lengths_file
from bert_jax.data.preparation.shards import write_shard
from bert_jax.data.records import RANDOM_NEXT
from bert_jax.errors import InputError
from bert_jax.files import atomic, provenance
from bert_jax.text.tokenizer import token_dtype

SHARD = "eval-00000-of-00001.array_record"
FEATURES = (
    "input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels",
)  # fmt: skip


def records(path: Path) -> Iterator[bytes]:
    """Yields the records of a TFRecord file: 8 bytes of length, 4 of its checksum, the data, and 4 of its checksum."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while header := file.read(12):
            length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else size
            if file.tell() + length + 4 > size:
                raise InputError(f"{path}: truncated, or no TFRecord file")
            yield file.read(length + 4)[:length]


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the variable-length integer at a place of a protocol buffer, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields number and content of the fields of a message that has only fields with a length."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        size, at = varint(message, at)
        if key & 7 != 2 or at + size > len(message):
            raise ValueError(f"field {key >> 3} of type {key & 7}")
        yield key >> 3, message[at : at + size]
        at += size


def integers(packed: bytes) -> np.ndarray:
    """Returns the integers of a packed field."""
    values, at = [], 0
    while at < len(packed):
        value, at = varint(packed, at)
        values.append(value)
    return np.array(values, np.int64)


def example(record: bytes) -> dict[str, np.ndarray]:
    """Returns the `FEATURES` of a serialized tf.train.Example."""
    found = {}
    for _, features in fields(record):
        for _, entry in fields(features):
            parts = dict(fields(entry))  # a name and a Feature, of which field 3 is a list of integers
            if (name := parts[1].decode()) in FEATURES:
                found[name] = integers(dict(fields(dict(fields(parts[2]))[3]))[1])
    if missing := [name for name in FEATURES if name not in found]:
        raise ValueError(f"no feature {missing[0]}")
    return found


def segments(features: dict[str, np.ndarray], dataset: PreparedDataset) -> tuple[np.ndarray, np.ndarray, bool]:
    """Returns the tokens of A and of B without masks and special tokens, and whether B is random."""
    ids, positions = features["input_ids"].copy(), features["masked_lm_positions"]
    used = positions > 0  # unused predictions have position 0, that of [CLS]
    ids[positions[used]] = features["masked_lm_ids"][used]
    is_real = features["input_mask"] == 1
    length, first = int(is_real.sum()), int((is_real & (features["segment_ids"] == 0)).sum())
    special = [dataset.tokenizer.cls_id, dataset.tokenizer.sep_id, dataset.tokenizer.sep_id]
    if len(ids) != dataset.info.seq_len:
        raise ValueError(f"{len(ids)} tokens, where the dataset has {dataset.info.seq_len}")
    if ids[[0, first - 1, length - 1]].tolist() != special or ids.max() >= dataset.tokenizer.vocab_size:
        raise ValueError("another vocabulary than the dataset's, or no pair of segments")
    return ids[1 : first - 1], ids[first : length - 1], bool(features["next_sentence_labels"][0])


def convert(folder: str, files: list[Path]) -> int:
    """Writes the sequences of `files` as the eval split of a dataset; returns their number."""
    dataset = PreparedDataset(folder)
    if dataset.size("eval"):
        raise InputError(f"{folder} has an eval split; prepare it with --eval_fraction 0")
    if (pairs := dataset.info.options.get("pairs")) != "nsp":
        raise InputError(f"{folder} was prepared with --pairs {pairs}, and the files have pairs for next sentences")
    tokens, spans, end = [], [], 0
    for path in files:
        for number, record in enumerate(records(path)):
            try:
                first, second, is_random = segments(example(record), dataset)
            except (ValueError, LookupError, OverflowError) as error:
                raise InputError(f"{path}: record {number}: {error}") from error
            middle, stop = end + len(first), end + len(first) + len(second)
            spans.append((end, middle, middle, stop, RANDOM_NEXT * is_random))
            tokens += [first, second]
            end = stop
    if not spans:
        raise InputError(f"{files[0]}: no records")
    flat = np.concatenate(tokens).astype(token_dtype(dataset.tokenizer.vocab_size))
    shard, lengths = write_shard(
        str(dataset.folder / SHARD), flat, np.arange(len(spans), dtype=np.uint64), np.array(spans, np.int32)
    )
    # Without tokens, since none of them are of the corpus that was read.
    split = SplitInfo(instances=len(spans), shards=(shard,), random_next=sum(span[4] == RANDOM_NEXT for span in spans))
    name, content = lengths_file("eval"), array_bytes(lengths)
    info = replace(
        dataset.info, splits={**dataset.info.splits, "eval": split},
        arrays={**dataset.info.arrays, name: digest(content)},
    ).with_hash()  # fmt: skip
    atomic.write_whole(dataset.folder / name, content)
    atomic.write_whole(dataset.folder / "dataset.json", info.to_json().encode())
    provenance.append(dataset.folder, provenance.record({"eval_files": list(map(str, files))}, dataset_hash=info.hash))
    return len(spans)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="folder of `bert-jax prepare`, changed in place")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    try:
        print(f"{convert(options.dataset, options.files):,} sequences are the eval split of {options.dataset}")
    except (InputError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
