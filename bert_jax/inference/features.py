"""The feature-based approach: hidden states of chosen layers, for each token of each line of a file.

A line is one text, or two as `text ||| text`; it is truncated to the maximum length at the end of the longer text. A
"[MASK]" in it is plain text. Two output formats:

FILE           JSON lines, one per input line, in the format of google-research/bert's extract_features.py:
               {"linex_index": 0, "features": [{"token": "[CLS]", "layers": [{"index": -1, "values": [...]}]}]}
FILE.npz       `values` [tokens, layers, hidden_size] fp32, `tokens` and `input_ids` [tokens], `layers` [layers],
               and `offsets` [lines + 1]: the tokens of line i are those from offsets[i] to offsets[i + 1]
"""

import itertools
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bert_jax.config import ConfigDict
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.file_formats import check_lines, not_utf8
from bert_jax.files.line_reader import lines_from
from bert_jax.model import abstract_parameters
from bert_jax.model.bert import Parameters
from bert_jax.parallel.host_batches import put_batch
from bert_jax.parallel.mesh import make_mesh
from bert_jax.parallel.sharding import batch_sharding, parameter_shardings
from bert_jax.progress import Bars, silent
from bert_jax.text.tokenization import WordPieceTokenizer
from bert_jax.training.checkpointing.checkpoints import Checkpoint, open_checkpoint
from bert_jax.training.checks import check_batch_size

LAYER_NAMES = ("embeddings", "first", "second_to_last", "last", "last_four", "all")
"""Layer names for `parse_layers`. `embeddings` is the sum of the three embeddings, after LayerNorm."""

_SORTED_BATCHES = 16  # batches whose lines are sorted by length together, to save padding
_SHORTEST_BUCKET = 32


@dataclass(frozen=True)
class Line:
    """An encoded line of the input: ids with special tokens, and token types of both segments."""

    input_ids: list[int]
    token_type_ids: list[int]


@dataclass(frozen=True)
class Extracted:
    """Numbers of lines and tokens written, and of lines `cut` (truncated) to `seq_len` tokens."""

    lines: int
    tokens: int
    cut: int
    seq_len: int


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
            raise InputError(f"--layers: unknown layer {layer!r:.60}; use numbers, or {', '.join(LAYER_NAMES)}")
        if isinstance(layer, int) and not -num_hidden_layers <= layer < num_hidden_layers:
            raise InputError(
                f"--layers: unknown layer {layer}; the model has {num_hidden_layers}, "
                f"{-num_hidden_layers} to {num_hidden_layers - 1}"
            )
    positions = [_hidden_state(layer, num_hidden_layers) for layer in layers]
    if len(set(positions)) < len(positions):
        raise InputError(f"--layers={given}: duplicate layer; list each layer once")
    return layers


def _hidden_state(layer: int | str, num_hidden_layers: int) -> int:
    """Returns the layer's index in the hidden states [layers + 1, ...], of which the first are the embeddings."""
    return 0 if isinstance(layer, str) else layer % num_hidden_layers + 1


def extract(
    checkpoint: str,
    input: str,
    output: str,
    *,
    layers: str = "-1,-2,-3,-4",
    seq_len: int | None = None,
    batch_size: int = 32,
    bars: Bars = silent,
) -> Extracted:
    """Writes the features of every line of `input` to `output`, atomically.

    Args:
      checkpoint: any CHECKPOINT; no head is needed.
      input: a text file in UTF-8, compressed or not.
      output: JSON lines, or arrays if the name ends in `.npz`. The file must not exist.
      layers: see `parse_layers`.
      seq_len: maximum tokens per line, special tokens included; by default the model's maximum.
      batch_size: lines per batch.
      bars: creates progress bars.

    Raises:
      InputError: an argument, the checkpoint or the input is invalid.
    """
    target = remote.named(output)
    if remote.exists(target):
        raise InputError(f"--output={target}: already exists; choose another name or delete it")
    check_batch_size(batch_size)
    source = Path(input)  # epath takes a pipe for a file
    if not remote.is_remote(input) and source.exists() and not source.is_file():
        raise InputError(f"--input={input}: expected a regular file, since it is read twice; save the input to a file")
    check_lines(input)
    found = open_checkpoint(checkpoint)
    config, tokenizer = found.bert_config, found.tokenizer
    chosen = parse_layers(layers, config.num_hidden_layers)
    length = config.max_position_embeddings if seq_len is None else seq_len
    if not 3 <= length <= config.max_position_embeddings:
        raise InputError(f"--seq_len={seq_len}: expected 3 to {config.max_position_embeddings}, the model's maximum")

    atomic.make_folder(target.parent)
    with atomic.whole_file(target) as file:
        lengths, cut = _measure(input, tokenizer, length, segments=config.type_vocab_size)
        if not lengths:
            raise InputError(f"--input={input}: the file is empty: expected at least one line")
        encoder = _Encoder(found, chosen, min(batch_size, len(lengths)))
        with closing(bars(total=len(lengths), desc="features", unit="line")) as bar:

            def values() -> Iterator[tuple[Line, np.ndarray]]:
                measured = iter(lengths)
                for line, hidden in encoder(_read(input, tokenizer, length)):
                    if len(line.input_ids) != next(measured, None):
                        raise InputError(f"--input={input}: the file changed while it was read; run it again")
                    yield line, hidden
                    bar.update(1)
                if next(measured, None) is not None:
                    raise InputError(f"--input={input}: the file changed while it was read; run it again")

            if target.suffix == ".npz":
                _write_arrays(file, values(), lengths, tokenizer, chosen, config.hidden_size)
            else:
                _write_json_lines(file, values(), tokenizer, chosen)
    return Extracted(len(lengths), sum(lengths), cut, length)


# --- Reading ---------------------------------------------------------------------------------------------------------


def _texts(path: str) -> Iterator[tuple[str, str | None]]:
    for number, (_, line) in enumerate(lines_from(path, 0, None), start=1):
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise not_utf8(path, number, line[error.start]) from error
        pair = re.fullmatch(r"(.*) \|\|\| (.*)", text, re.DOTALL)
        yield (pair[1], pair[2]) if pair else (text, None)


def _encoded(path: str, tokenizer: WordPieceTokenizer) -> Iterator[tuple[list[int], list[int] | None]]:
    """Yields the ids of each line's text and pair, without special tokens and truncation."""
    texts = _texts(path)
    while some := list(itertools.islice(texts, 1024)):
        first = tokenizer.encode_batch([text for text, _ in some])
        second = tokenizer.encode_batch([pair or "" for _, pair in some])
        for (_, pair), a, b in zip(some, first, second, strict=True):
            yield a, None if pair is None else b


def _read(path: str, tokenizer: WordPieceTokenizer, length: int) -> Iterator[Line]:
    for a, b in _encoded(path, tokenizer):
        keep_a, keep_b = _kept(len(a), None if b is None else len(b), length)
        first = [tokenizer.cls_id, *a[:keep_a], tokenizer.sep_id]
        second = [] if b is None else [*b[:keep_b], tokenizer.sep_id]
        yield Line(first + second, [0] * len(first) + [1] * len(second))


def _kept(a: int, b: int | None, length: int) -> tuple[int, int]:
    """Returns the tokens to keep of each text for `length` in total: truncates the longer, or the second in a tie."""
    if b is None:
        return min(a, length - 2), 0
    budget = length - 3
    over = a + b - budget
    if over <= 0:
        return a, b
    if abs(a - b) >= over:  # the longer alone
        return (a - over, b) if a > b else (a, b - over)
    return budget - budget // 2, budget // 2


def _measure(path: str, tokenizer: WordPieceTokenizer, length: int, segments: int) -> tuple[list[int], int]:
    """Returns the tokens of each `_read` line, and the number of truncated lines. InputError for invalid pairs."""
    lengths, cut = [], 0
    for number, (a, b) in enumerate(_encoded(path, tokenizer), start=1):
        if b is not None and segments < 2:
            raise InputError(f"{path}:{number}: got a pair, but the model has no second segment (type_vocab_size=1)")
        whole = len(a) + 2 if b is None else len(a) + len(b) + 3
        cut += whole > length
        lengths.append(min(whole, length))
    return lengths, cut


# --- Running ---------------------------------------------------------------------------------------------------------


class _Encoder:
    """Computes the chosen hidden states of lines on all devices; lines of similar length share a batch."""

    def __init__(self, checkpoint: Checkpoint, layers: Sequence[int | str], batch_size: int):
        config = checkpoint.bert_config
        self._mesh = make_mesh(ConfigDict({"data": -1, "fsdp": 1, "tensor": 1}))
        self._rows = -(-batch_size // self._mesh.size) * self._mesh.size
        self._longest = config.max_position_embeddings
        graph, _, info = abstract_parameters(config, heads=checkpoint.heads)
        shardings = parameter_shardings(self._mesh, info)
        self._parameters = checkpoint.load_parameters(shardings)
        states = np.array([_hidden_state(layer, config.num_hidden_layers) for layer in layers])

        def hidden_states(parameters: Parameters, batch: Mapping[str, jax.Array]) -> jax.Array:
            rows = jax.tree.map(lambda entry: entry[0], batch)
            _, hidden = nnx.merge(graph, parameters).encode(rows, all_hidden_states=True)
            return jnp.moveaxis(hidden[states], 0, 2)  # [B, L, layers, D]

        self._run = jax.jit(hidden_states, in_shardings=(shardings, batch_sharding(self._mesh)))

    def __call__(self, lines: Iterator[Line]) -> Iterator[tuple[Line, np.ndarray]]:
        """Yields each line with its hidden states [tokens, layers, D], in order."""
        while some := list(itertools.islice(lines, self._rows * _SORTED_BATCHES)):
            results: dict[int, np.ndarray] = {}
            by_length = sorted(range(len(some)), key=lambda index: len(some[index].input_ids))
            for start in range(0, len(some), self._rows):
                indices = by_length[start : start + self._rows]
                hidden = jax.device_get(self._run(self._parameters, self._batch([some[index] for index in indices])))
                for row, index in enumerate(indices):
                    results[index] = hidden[row, : len(some[index].input_ids)]
            for index, line in enumerate(some):
                yield line, results.pop(index)

    def _batch(self, lines: Sequence[Line]) -> dict[str, jax.Array]:
        longest = max(len(line.input_ids) for line in lines)
        length = _SHORTEST_BUCKET
        while length < longest:  # few lengths, so that few programs are compiled
            length *= 2
        length = min(length, self._longest)
        shape = (self._rows, length)
        batch = {name: np.zeros(shape, np.int32) for name in ("input_ids", "token_type_ids", "sequence_ids")}
        for row, line in enumerate(lines):
            count = len(line.input_ids)
            batch["input_ids"][row, :count] = line.input_ids
            batch["token_type_ids"][row, :count] = line.token_type_ids
            batch["sequence_ids"][row, :count] = 1
        batch["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
        return put_batch(self._mesh, batch)


# --- Writing ---------------------------------------------------------------------------------------------------------


def _write_json_lines(
    file: IO[bytes],
    values: Iterable[tuple[Line, np.ndarray]],
    tokenizer: WordPieceTokenizer,
    layers: Sequence[int | str],
) -> None:
    for number, (line, hidden) in enumerate(values):
        features = [
            {
                "token": tokenizer.id_to_token(token),
                "layers": [
                    {"index": layer, "values": [round(value, 6) for value in row.tolist()]}
                    for layer, row in zip(layers, rows, strict=True)
                ],
            }
            for token, rows in zip(line.input_ids, hidden, strict=True)
        ]
        file.write(json.dumps({"linex_index": number, "features": features}).encode() + b"\n")


def _write_arrays(
    file: IO[bytes],
    values: Iterable[tuple[Line, np.ndarray]],
    lengths: Sequence[int],
    tokenizer: WordPieceTokenizer,
    layers: Sequence[int | str],
    hidden_size: int,
) -> None:
    """Writes an uncompressed .npz, and its large array incrementally."""
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    input_ids = np.empty(offsets[-1], np.int32)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("values.npy", "w", force_zip64=True) as member:
            header = {
                "descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)),
                "fortran_order": False,
                "shape": (int(offsets[-1]), len(layers), hidden_size),
            }
            np.lib.format.write_array_header_1_0(member, header)
            for number, (line, hidden) in enumerate(values):
                input_ids[offsets[number] : offsets[number + 1]] = line.input_ids
                member.write(np.ascontiguousarray(hidden, np.float32).tobytes())
        arrays: dict[str, Any] = {
            "tokens": np.array(tokenizer.vocab)[input_ids],
            "input_ids": input_ids,
            "offsets": offsets,
            "layers": np.array([str(layer) for layer in layers]),
        }
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
