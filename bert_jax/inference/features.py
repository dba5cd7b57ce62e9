"""The feature-based approach: hidden states of a file's lines, for each token or pooled to one vector per line.

A line is one text, or two as `text ||| text`; it is truncated to the maximum length at the end of the longer text. A
"[MASK]" in it is plain text. Two output formats:

FILE           JSON lines, one per input line, in the format of google-research/bert's extract_features.py:
               {"linex_index": 0, "features": [{"token": "[CLS]", "layers": [{"index": -1, "values": [...]}]}]}
FILE.npz       `values` [tokens, layers, hidden_size] fp32, `tokens` and `input_ids` [tokens], `layers` [layers],
               and `offsets` [lines + 1]: the tokens of line i are those from offsets[i] to offsets[i + 1]

With a pooling, of one layer:

FILE           {"linex_index": 0, "pool": "mean", "layer": -1, "tokens": 9, "values": [...]}
FILE.npz       `values` [lines, hidden_size] fp32, `tokens` [lines] (tokens of each line), `layer` and `pool`
"""

import functools
import itertools
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.text_files import Utf8, decode_line, lines_from, named_format, text_format
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.forward import Forward, LoadedModel, check_segments, load_model
from bert_jax.inference.opening import open_model_of
from bert_jax.inference.text_encoder import check_pool, pool_hidden_states
from bert_jax.model import BertConfig, BertForPreTraining
from bert_jax.progress import Bars, silent
from bert_jax.text.sequences import EncodedSequence, encode_pairs
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.evaluation import check_batch_size

LAYER_NAMES = ("embeddings", "first", "second_to_last", "last", "last_four", "all")
"""Layer names for `parse_layers`. `embeddings` is the sum of the three embeddings, after LayerNorm."""

_SORTED_BATCHES = 16  # batches whose lines are sorted by length together, to save padding
_SORTED_BYTES = 1 << 30  # their outputs, which are in memory together
_LINES_AT_ONCE = 1024  # per call of the tokenizer

Line = tuple[EncodedSequence, np.ndarray]
"""A line and its outputs: [tokens, layers, D], or [D] if they are pooled."""


@dataclass(frozen=True)
class Extracted:
    """Numbers of lines and tokens read, and of lines `cut` (truncated) to `seq_len` tokens; the layers written."""

    lines: int
    tokens: int
    cut: int
    seq_len: int
    layers: str


def parse_layers(given: str, num_hidden_layers: int) -> list[int | str]:
    """Parses a list of layers such as "-1,-2" or "embeddings,last".

    Layer 0 is the first above the embeddings and -1 the last, as in the reference. A name is replaced by its number or
    numbers, except `embeddings`, which has none.

    Raises:
      InputError: unknown or duplicate layer.
    """
    by_name: dict[str, list[int | str]] = {
        "embeddings": ["embeddings"],
        "first": [0],
        "second_to_last": [-2],
        "last": [-1],
        "last_four": [-1, -2, -3, -4],
        "all": list(range(num_hidden_layers)),
    }
    layers: list[int | str] = []
    for word in given.split(","):
        word = word.strip()
        layers += by_name[word] if word in by_name else [int(word)] if re.fullmatch(r"-?[0-9]{1,18}", word) else [word]
    for layer in layers:
        if isinstance(layer, str) and layer not in by_name:
            raise InputError(f"layers: unknown layer {layer!r:.60}; use numbers, or {', '.join(LAYER_NAMES)}")
        if isinstance(layer, int) and not -num_hidden_layers <= layer < num_hidden_layers:
            raise InputError(
                f"layers: unknown layer {layer}; the model has {num_hidden_layers}, "
                f"{-num_hidden_layers} to {num_hidden_layers - 1}"
            )
    positions = [_hidden_state(layer, num_hidden_layers) for layer in layers]
    if len(set(positions)) < len(positions):
        raise InputError(f"layers={given}: duplicate layer; list each layer once")
    return layers


def _hidden_state(layer: int | str, num_hidden_layers: int) -> int:
    """Returns the layer's index in the hidden states [layers + 1, ...], of which the first are the embeddings."""
    return 0 if isinstance(layer, str) else layer % num_hidden_layers + 1


def extract(
    checkpoint: str,
    input: str,
    output: str,
    *,
    layers: str | None = None,
    pool: str | None = None,
    seq_len: int | None = None,
    batch_size: int = 32,
    bars: Bars = silent,
) -> Extracted:
    """Writes the features of every line of `input` to `output`, atomically.

    Args:
      checkpoint: any model that `bert_jax.load` takes; no head is needed.
      input: a text file in UTF-8, compressed or not.
      output: JSON lines, or arrays if the name ends in `.npz`. The file must not exist.
      layers: see `parse_layers`; by default the last four, with `pool` the last.
      pool: "mean" or "cls" for one vector per line, see `pool_hidden_states`; None for all tokens.
      seq_len: maximum tokens per line, special tokens included; by default the model's maximum.
      batch_size: lines per batch.
      bars: creates progress bars.

    Raises:
      InputError: an argument, the checkpoint or the input is invalid.
    """
    target = remote.parse_path(output)
    if remote.exists(target):
        raise InputError(f"output={target}: already exists; choose another name or delete it")
    check_batch_size(batch_size)
    _check_input(input)
    found = open_model_of(checkpoint)
    config, tokenizer = found.bert_config, found.tokenizer
    if layers is None:  # the last four, of those that there are
        layers = "-1" if pool else ",".join(str(-layer) for layer in range(1, min(4, config.num_hidden_layers) + 1))
    chosen = parse_layers(layers, config.num_hidden_layers)
    if pool is not None:
        check_pool("pool", pool, config)
        if len(chosen) > 1:
            raise InputError(f"layers={layers}: pool={pool} supports one layer, got {len(chosen)}; use layers=-1")
    length = config.max_position_embeddings if seq_len is None else seq_len
    if not 3 <= length <= config.max_position_embeddings:
        raise InputError(f"seq_len={seq_len}: expected 3 to {config.max_position_embeddings}, the model's maximum")

    atomic.make_folder(target.parent)
    with atomic.whole_file(target) as file:
        texts = list(_texts(input))
        lengths, cut = _measure(input, texts, tokenizer, config, length)
        states = tuple(_hidden_state(layer, config.num_hidden_layers) for layer in chosen)
        model = load_model(
            found, batch_size=min(batch_size, len(texts)), max_seq_len=length,
            forward=select_hidden_states(states, pool),
        )  # fmt: skip
        size = model.predictor.batch_size
        line_bytes = (1 if pool else max(lengths) * len(chosen)) * 4 * config.hidden_size
        sorted_lines = size * max(1, min(_SORTED_BATCHES, _SORTED_BYTES // (size * line_bytes)))
        with closing(bars(total=len(texts), desc="features", unit="line")) as bar:

            def lines() -> Iterator[Line]:
                for line in _hidden_of(model, _encode(tokenizer, texts, length), sorted_lines):
                    yield line
                    bar.update(1)

            if target.suffix == ".npz":
                _write_arrays(file, lines(), lengths, tokenizer, chosen, pool, config.hidden_size)
            else:
                _write_json_lines(file, lines(), tokenizer, chosen, pool)
    return Extracted(len(lengths), sum(lengths), cut, length, layers)


# --- Reading ---------------------------------------------------------------------------------------------------------


def _check_input(path: str) -> None:
    place = Path(path)  # epath takes a pipe for a file
    if not remote.is_remote(path) and place.exists() and not place.is_file():
        raise InputError(f"input={path}: expected a regular file; save the input to a file")
    if named_format(path):
        raise InputError(f"input={path}: got a table or JSON lines, expected a file of plain text, one text a line")
    text_format(path)  # refuses what is not text


def _texts(path: str) -> Iterator[tuple[str, str | None]]:
    for offset, line in lines_from(path, 0, None):
        text = decode_line(line, path, offset, Utf8()).strip()
        pair = re.fullmatch(r"(.*) \|\|\| (.*)", text, re.DOTALL)
        yield (pair[1], pair[2]) if pair else (text, None)


def _encode(tokenizer: Tokenizer, texts: Sequence[tuple[str, str | None]], length: int) -> Iterator[EncodedSequence]:
    for start in range(0, len(texts), _LINES_AT_ONCE):
        yield from encode_pairs(tokenizer, texts[start : start + _LINES_AT_ONCE], length)


def _measure(
    path: str, texts: Sequence[tuple[str, str | None]], tokenizer: Tokenizer, config: BertConfig, length: int
) -> tuple[list[int], int]:
    """Returns the tokens of each line, at most `length`, and the number of lines that are truncated to it.

    Raises InputError without a line, and for a pair that the model has no second segment for.
    """
    if not texts:
        raise InputError(f"input={path}: the file is empty: expected at least one line")
    lengths = []
    for number, line in enumerate(_encode(tokenizer, texts, sys.maxsize), start=1):
        lengths.append(len(line.input_ids))
        try:
            check_segments(config.type_vocab_size, [line])
        except InputError as error:
            raise InputError(f"{path}:{number}: {error}") from error
    return [min(tokens, length) for tokens in lengths], sum(tokens > length for tokens in lengths)


# --- Running ---------------------------------------------------------------------------------------------------------


@functools.cache
def select_hidden_states(states: tuple[int, ...], pool: str | None) -> Forward:
    """Makes the forward pass that returns these hidden states of every token, or the first of them pooled."""

    def hidden_states(model: BertForPreTraining, batch: Batch[jax.Array]) -> jax.Array:
        _, hidden = model.encode(batch, all_hidden_states=True)
        assert hidden is not None
        if pool is not None:
            return pool_hidden_states(hidden[states[0]], batch, pool)
        return jnp.moveaxis(hidden[np.array(states)], 0, 2)  # [B, L, layers, D]

    return hidden_states


def _hidden_of(model: LoadedModel, lines: Iterator[EncodedSequence], sorted_lines: int) -> Iterator[Line]:
    """Yields each line with the outputs of the model, in order.

    Among `sorted_lines` lines, those of similar length share a batch.
    """
    while some := list(itertools.islice(lines, sorted_lines)):
        yield from zip(some, model.outputs(EncodedExamples(some, None), in_full_batches=True), strict=True)


# --- Writing ---------------------------------------------------------------------------------------------------------


def _write_json_lines(
    file: IO[bytes], lines: Iterator[Line], tokenizer: Tokenizer, layers: Sequence[int | str], pool: str | None
) -> None:
    def rounded(values: np.ndarray) -> list[float]:
        return [round(value, 6) for value in values.tolist()]

    for number, (line, hidden) in enumerate(lines):
        if pool is not None:
            tokens = len(line.input_ids)
            row: dict[str, Any] = {"pool": pool, "layer": layers[0], "tokens": tokens, "values": rounded(hidden)}
        else:
            row = {"features": [
                {
                    "token": tokenizer.id_to_token(token),
                    "layers": [
                        {"index": layer, "values": rounded(values)} for layer, values in zip(layers, rows, strict=True)
                    ],
                }
                for token, rows in zip(line.input_ids, hidden, strict=True)
            ]}  # fmt: skip
        file.write(json.dumps({"linex_index": number, **row}).encode() + b"\n")


def _write_arrays(
    file: IO[bytes], lines: Iterator[Line], lengths: Sequence[int], tokenizer: Tokenizer, layers: Sequence[int | str],
    pool: str | None, hidden_size: int,
) -> None:  # fmt: skip
    """Writes an uncompressed .npz, whose array `values` is too large for the memory: numpy has no writer for that."""
    shape = (len(lengths), hidden_size) if pool is not None else (sum(lengths), len(layers), hidden_size)
    input_ids: list[np.ndarray] = []
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("values.npy", "w", force_zip64=True) as member:
            header = {"descr": np.dtype(np.float32).str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            for line, hidden in lines:
                input_ids.append(np.array(line.input_ids, np.int32))
                member.write(np.ascontiguousarray(hidden, np.float32).tobytes())
        names, all_ids = np.array([str(layer) for layer in layers]), np.concatenate(input_ids)
        if pool is not None:
            arrays = {"tokens": np.array(lengths, np.int64), "layer": names[0], "pool": np.array(pool)}
        else:
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            tokens = np.array(tokenizer.vocab)[all_ids]
            arrays = {"tokens": tokens, "input_ids": all_ids, "offsets": offsets, "layers": names}
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
