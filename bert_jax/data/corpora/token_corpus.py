"""Reads documents that are already tokenized: rows of Parquet and Arrow files with lists of token ids.

A row is a document: a list of sentences, which are lists of ids; or one list of ids, a document of one sentence.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from bert_jax.data.corpora.record_corpus import COLUMNAR, checked_column
from bert_jax.errors import InputError
from bert_jax.files.tables import columnar_file
from bert_jax.files.text_files import named_format
from bert_jax.text.tokenizer import Tokenizer, token_dtype

if TYPE_CHECKING:
    import pyarrow as pa


def token_documents(path: str, start: int, end: int | None, column: str, tokenizer: Tokenizer) -> Iterator[list[bytes]]:
    """Yields the sentences of each document in the row groups or record batches [start, end) of a file.

    A sentence is its ids as bytes of `token_dtype`; empty sentences and documents are dropped.

    Raises:
      InputError: the file is no Parquet or Arrow file, is damaged, or has no such column of lists of integers; or, with
        the row, an id is null, not in the vocabulary, or that of a special token other than [UNK].
    """
    kind = named_format(path)
    if kind not in COLUMNAR:
        raise InputError(f"--ids_field={column}: got {path}, expected only Parquet or Arrow files (.parquet, .arrow)")
    with columnar_file(path, kind) as file:
        depth = _depth(path, column, checked_column(path, file.schema, column, "--ids_field"))
        for where, first, values in file.batches(start, end, column):
            counts, lengths, ids = _flat(values, depth)
            sentence_ends = np.cumsum(lengths)
            document_ends = np.cumsum(counts)
            invalid = _invalid(ids, tokenizer)
            if invalid.any():
                number = int(np.argmax(invalid))
                sentence = int(np.searchsorted(sentence_ends, number, side="right"))
                row = first + int(np.searchsorted(document_ends, sentence, side="right"))
                raise InputError(f"{path}: {where}{row}: {_problem(ids, number, tokenizer)}")
            data = ids.astype(token_dtype(tokenizer.vocab_size))
            bounds = [0, *(sentence_ends * data.itemsize).tolist()]
            content = data.tobytes()
            sentence = 0
            for stop in document_ends.tolist():
                found = [content[bounds[i] : bounds[i + 1]] for i in range(sentence, stop) if bounds[i] < bounds[i + 1]]
                sentence = stop
                if found:
                    yield found


def _depth(path: str, column: str, found: "pa.DataType") -> int:
    """Returns 1 for lists of ids, 2 for lists of lists of ids. Raises InputError for any other type."""
    import pyarrow as pa

    inner, depth = found, 0
    while pa.types.is_list(inner) or pa.types.is_large_list(inner) or pa.types.is_fixed_size_list(inner):
        inner, depth = inner.value_type, depth + 1
    if depth not in (1, 2) or not pa.types.is_integer(inner):
        raise InputError(
            f'{path}: column "{column}" is of type {found}, expected list<int32> (a document), or list<list<int32>> '
            "(the sentences of a document)"
        )
    return depth


def _flat(values: "pa.Array", depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the number of sentences of each row, the number of ids of each sentence, and all ids; null ids are -1."""
    import pyarrow as pa
    import pyarrow.compute as pc

    counts = np.ones(len(values), np.int64)
    if depth == 2:
        counts = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        values = values.flatten()
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    ids = pc.fill_null(values.flatten().cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    return counts, lengths, ids


def _invalid(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    return (ids < 0) | (ids >= tokenizer.vocab_size) | np.isin(ids, _special_ids(tokenizer))


def _special_ids(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id]


def _problem(ids: np.ndarray, number: int, tokenizer: Tokenizer) -> str:
    token = int(ids[number])
    if token in _special_ids(tokenizer):
        return (
            f"got the id {token} of a special token, which prepare adds itself; tokenize with add_special_tokens=False"
        )
    found = "null" if token == -1 else token
    return f"got the id {found}, expected 0 to {tokenizer.vocab_size - 1}; pass the --vocab of its tokenizer"
