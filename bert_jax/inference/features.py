"""The feature-based approach: hidden states of each token of a file's lines.

A line is one text, or two as `text ||| text`; it is truncated to the maximum length at the end of the longer text. A
"[MASK]" in it is plain text. Two output formats:

FILE           JSON lines, one per input line, in the format of google-research/bert's extract_features.py:
               {"linex_index": 0, "features": [{"token": "[CLS]", "layers": [{"index": -1, "values": [...]}]}]}
FILE.npz       `values` [tokens, layers, hidden_size] fp32, `tokens` and `input_ids` [tokens], `layers` [layers],
               and `offsets` [lines + 1]: the tokens of line i are those from offsets[i] to offsets[i + 1]

JSON lines are written as they are computed; the arrays of a .npz are in memory together.
"""

import functools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.text_files import read_lines
from bert_jax.finetuning.batches import EncodedExamples, Forward, check_segments, load_model
from bert_jax.inference.pretrained import open_model_of
from bert_jax.model import BertForPreTraining
from bert_jax.progress import Bars, silent
from bert_jax.text.sequences import EncodedSequence, encode_pairs
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.evaluation import check_batch_size

_BATCHES = 4  # whose lines are sorted by length together, to save padding

Line = tuple[EncodedSequence, np.ndarray]
"""A line and its outputs [tokens, layers, D]."""


def parse_layers(given: str, num_hidden_layers: int) -> list[int | str]:
    """Parses a list of layers such as "-1,-2" or "embeddings,0", or "all", which are those above the embeddings.

    Layer 0 is the first above the embeddings and -1 the last, as in the reference; `embeddings` is the sum of the three
    embeddings, after LayerNorm. Raises InputError for an unknown layer.
    """
    layers: list[int | str] = []
    for word in map(str.strip, given.split(",")):
        if word == "all":
            layers += range(num_hidden_layers)
        elif word == "embeddings":
            layers.append(word)
        elif re.fullmatch("-?[0-9]{1,4}", word) and -num_hidden_layers <= int(word) < num_hidden_layers:
            layers.append(int(word))
        else:
            raise InputError(
                f"layers={given:.60}: unknown layer {word!r:.60}; use all, embeddings, or numbers from "
                f"{-num_hidden_layers} to {num_hidden_layers - 1}"
            )
    return layers


def extract(
    checkpoint: str, input: str, output: str, *, layers: str | None = None,
    seq_len: int | None = None, batch_size: int = 32, bars: Bars = silent,
) -> dict[str, Any]:  # fmt: skip
    """Writes the features of every line of `input` to `output`, atomically.

    Returns `output`, the numbers of `lines`, `tokens` and `truncated_lines`, and `layers` and `seq_len`.

    Args:
      checkpoint: any model that `bert_jax.load` takes; no head is needed.
      input: a text file in UTF-8, compressed or not.
      output: JSON lines, or arrays if the name ends in `.npz`. The file must not exist.
      layers: see `parse_layers`; by default the last four.
      seq_len: maximum tokens per line, special tokens included; by default the model's maximum.
      batch_size: lines per batch.
      bars: creates progress bars.

    Raises:
      InputError: an argument, the checkpoint or the input is invalid.
    """
    target = remote.parse_path(output)
    check_batch_size(batch_size)
    texts: list[tuple[str, str | None]] = []
    for text in read_lines(input):
        first, bars_between, second = text.rpartition(" ||| ")
        texts.append((first, second) if bars_between else (second, None))
    found = open_model_of(checkpoint)
    config, tokenizer = found.bert_config, found.tokenizer
    if layers is None:
        layers = ",".join(str(-layer) for layer in range(1, min(4, config.num_hidden_layers) + 1))
    chosen = parse_layers(layers, config.num_hidden_layers)
    length = config.max_position_embeddings if seq_len is None else seq_len
    if not 3 <= length <= config.max_position_embeddings:
        raise InputError(f"seq_len={seq_len}: expected 3 to {config.max_position_embeddings}, the model's maximum")
    atomic.check_file_output(output, is_new=True)

    sequences = encode_pairs(tokenizer, texts, length)
    check_segments(config.type_vocab_size, sequences, f"input={input}: ")
    whole = encode_pairs(tokenizer, texts, sys.maxsize)
    cut = sum(len(line.input_ids) > length for line in whole)
    states = tuple(0 if isinstance(layer, str) else layer % config.num_hidden_layers + 1 for layer in chosen)
    model = load_model(
        found, batch_size=min(batch_size, len(texts)), max_seq_len=length, forward=select_hidden_states(states)
    )
    with atomic.whole_file(target) as file, closing(bars(total=len(texts), desc="features", unit="line")) as bar:

        def lines() -> Iterator[Line]:
            step = _BATCHES * model.predictor.batch_size
            for start in range(0, len(sequences), step):
                some = sequences[start : start + step]
                yield from zip(some, model.outputs(EncodedExamples(some)), strict=True)
                bar.update(len(some))

        if target.suffix == ".npz":
            np.savez(file, **_arrays(list(lines()), tokenizer, chosen))  # type: ignore[arg-type]
        else:
            for number, line in enumerate(lines()):
                row = {"linex_index": number, "features": _features(line, tokenizer, chosen)}
                file.write(json.dumps(row).encode() + b"\n")
    return {
        "output": output, "lines": len(texts), "tokens": sum(len(line.input_ids) for line in sequences),
        "layers": layers, "seq_len": length, "truncated_lines": cut,
    }  # fmt: skip


@functools.cache
def select_hidden_states(states: tuple[int, ...]) -> Forward:
    """Makes the forward pass that returns these hidden states of every token."""

    def hidden_states(model: BertForPreTraining, batch: Batch[jax.Array]) -> jax.Array:
        _, hidden = model.encode(batch, all_hidden_states=True)
        assert hidden is not None
        return jnp.moveaxis(hidden[np.array(states)], 0, 2)  # [B, L, layers, D]

    return hidden_states


def _features(line: Line, tokenizer: Tokenizer, layers: Sequence[int | str]) -> list[dict[str, Any]]:
    features = []
    for token, states in zip(line[0].input_ids, line[1], strict=True):
        rows = [[round(value, 6) for value in values] for values in states.tolist()]
        of_layers = [{"index": layer, "values": row} for layer, row in zip(layers, rows, strict=True)]
        features.append({"token": tokenizer.id_to_token(token), "layers": of_layers})
    return features


def _arrays(lines: Sequence[Line], tokenizer: Tokenizer, layers: Sequence[int | str]) -> dict[str, np.ndarray]:
    names, lengths = np.array([str(layer) for layer in layers]), [len(line.input_ids) for line, _ in lines]
    input_ids = np.concatenate([line.input_ids for line, _ in lines]).astype(np.int32)
    return {
        "values": np.concatenate([hidden for _, hidden in lines]), "tokens": np.array(tokenizer.vocab)[input_ids],
        "input_ids": input_ids, "offsets": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), "layers": names,
    }  # fmt: skip
