"""Reads documents that are already tokenized: rows of Parquet and Arrow files with lists of token ids.

A row is a document: a list of sentences, which are lists of ids; or one list of ids, a document of one sentence.
"""

import itertools
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
    special = {tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id}
    known = set(range(tokenizer.vocab_size)) - special
    dtype = token_dtype(tokenizer.vocab_size)
    with columnar_file(path, kind) as file:
        has_sentences = _depth(path, column, checked_column(path, file.schema, column, "--ids_field")) == 2
        for where, first, values in file.batches(start, end, column):
            for row, document in enumerate(values.to_pylist(), first):
                sentences = list(filter(None, (document or []) if has_sentences else [document]))
                if not known.issuperset(itertools.chain.from_iterable(sentences)):
                    token = next(token for token in itertools.chain(*sentences) if token not in known)
                    raise InputError(f"{path}: {where}{row}: {_problem(token, special, tokenizer)}")
                if sentences:
                    yield [np.array(ids, dtype).tobytes() for ids in sentences]


def _problem(token: int | None, special: set[int], tokenizer: Tokenizer) -> str:
    if token in special:
        return (
            f"got the id {token} of a special token, which prepare adds itself; tokenize with add_special_tokens=False"
        )
    size = tokenizer.vocab_size
    return (
        f"got the id {'null' if token is None else token}, expected 0 to {size - 1}; pass the --vocab of its tokenizer"
    )


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
