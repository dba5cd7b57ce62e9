"""Pseudo-log-likelihoods of texts under a masked language model (Salazar et al. 2020, arXiv:1910.14659).

The score of a text is the sum over its tokens of log P(token | all others), in nats: each token is masked in a copy of
the text. `MASKINGS` has what else is masked with a token:

token              nothing: PLL. The rest of a word of several pieces gives its pieces away.
within_word_l2r    the later tokens of its word: PLL-word-l2r of Kauf and Ivanova 2023 (arXiv:2305.10588), within-word
                   left-to-right. Words are those of `Tokenizer.continues_word`.

[CLS] and [SEP] are read and not scored. A special token in a text is ordinary text. The pseudo-perplexity of texts is
exp(-sum of their scores / number of their tokens).
"""

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch, HostBatch
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.files.text_files import read_lines
from bert_jax.finetuning.batches import EncodedExamples, LoadedModel, load_model
from bert_jax.model import BertConfig
from bert_jax.progress import Bars, silent
from bert_jax.text.sequences import encode_sequence, pad_sequences
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.checkpoints import Checkpoint
from bert_jax.training.evaluation import check_batch_size

Masking = Literal["token", "within_word_l2r"]
MASKINGS = get_args(Masking)


@dataclass(frozen=True)
class Score:
    """The pseudo-log-likelihood of a text.

    Attributes:
      text: the text.
      score: sum of the log-probabilities of its tokens, in nats.
      tokens: number of tokens that were scored; [CLS] and [SEP] are not.
      truncated: True if the text had more tokens than the model reads; the others are not scored.
    """

    text: str
    score: float
    tokens: int
    truncated: bool


@dataclass(frozen=True)
class MaskedCopies(EncodedExamples):
    """Copies of sequences, each with one token to predict, made when their batch is.

    `targets` is int64 [copies, 3]: the sequence, the position of the token, and the end of what is masked with it.
    """

    targets: np.ndarray = field(kw_only=True)

    def __len__(self) -> int:
        return len(self.targets)

    def lengths(self) -> np.ndarray:
        return super().lengths()[self.targets[:, 0]]

    def batch(
        self, examples: np.ndarray, seq_len: int, count: int, tokenizer: Tokenizer, *, last_position: bool = False
    ) -> HostBatch:
        number, position, end = self.targets[examples].T
        batch = pad_sequences([self.sequences[i] for i in number.tolist()], count, seq_len, tokenizer.pad_id)
        batch["masked_positions"] = np.zeros((count, 1), np.int32)
        batch["masked_positions"][: len(position), 0] = position
        batch["masked_ids"] = np.take_along_axis(batch["input_ids"], batch["masked_positions"], axis=1)
        place = np.arange(seq_len)
        batch["input_ids"][: len(position)][(position[:, None] <= place) & (place < end[:, None])] = tokenizer.mask_id
        return batch


def target_log_probabilities(model: Any, batch: Batch[jax.Array]) -> jax.Array:
    """Returns the log-probabilities fp32 [B, P] of `masked_ids` at `masked_positions`."""
    log_probabilities = jax.nn.log_softmax(model(batch)[0], axis=-1)
    return jnp.take_along_axis(log_probabilities, batch["masked_ids"][..., None], axis=-1)[..., 0]


def check_masked_lm(use: str, has_head: bool, config: BertConfig) -> None:
    """Raises InputError, which names the `use`, for a model that predicts no masked tokens."""
    if not has_head:
        raise InputError(f"{use} requires an mlm_head, which the checkpoint lacks; use a pre-trained checkpoint")
    if config.is_decoder:
        raise InputError(f"{use} does not support a left-to-right model, which cannot use the text after a mask")


def score_texts(model: LoadedModel, texts: Sequence[str], masking: str, bars: Bars = silent) -> list[Score]:
    """Scores texts by a model that runs `target_log_probabilities`. The copies of all texts fill its batches."""
    if masking not in MASKINGS:
        raise InputError(f"masking={masking}: expected {' or '.join(MASKINGS)}")
    tokenizer, limit = model.predictor.tokenizer, model.predictor.max_seq_len
    ids = tokenizer.encode_batch(texts)
    sequences = [encode_sequence(tokenizer, one, None, limit) for one in ids]
    targets = []
    for number, sequence in enumerate(sequences):
        positions = np.arange(1, len(sequence.input_ids) - 1)
        ends = positions + 1
        if masking == "within_word_l2r":
            begins = np.flatnonzero(~tokenizer.continues_word(np.array([sequence.input_ids]))[0])
            ends = begins[np.searchsorted(begins, ends)]  # [SEP] begins a word
        targets.append(np.stack([np.full_like(positions, number), positions, ends], axis=1))
    copies = MaskedCopies(sequences, targets=np.concatenate(targets))
    with closing(bars(total=model.predictor.batches(copies), desc="score", unit="batch")) as bar:
        log_probabilities = np.array(model.outputs(copies, lambda: bar.update(1)), np.float64).reshape(-1)
    sums = np.bincount(copies.targets[:, 0], log_probabilities, minlength=len(texts)).tolist()
    return [
        Score(text, total, len(sequence.input_ids) - 2, len(one) + 2 > limit)
        for text, total, sequence, one in zip(texts, sums, sequences, ids, strict=True)
    ]


def score_lines(
    found: Checkpoint, input: str, output: str, *, masking: str = "token", batch_size: int = 32, bars: Bars = silent
) -> dict[str, Any]:
    """Writes the score of every line of `input` to `output`, atomically, as JSON lines with the fields of `Score`.

    Returns `output`, the numbers of `lines`, `tokens` and `truncated_lines`, and the `pseudo_perplexity` of all lines.

    Raises InputError if an argument, the checkpoint or the input is invalid, or no line has a token.
    """
    check_batch_size(batch_size)
    check_masked_lm("score", "mlm_head" in found.heads, found.bert_config)
    texts = read_lines(input)
    atomic.check_file_output(output, is_new=True)
    model = load_model(
        found, batch_size=batch_size, max_seq_len=found.bert_config.max_position_embeddings,
        forward=target_log_probabilities,
    )  # fmt: skip
    scores = score_texts(model, texts, masking, bars)
    tokens = sum(score.tokens for score in scores)
    if not tokens:
        raise InputError(f"input={input}: no line has a token; expected text")
    with atomic.whole_file(remote.parse_path(output)) as file:
        file.writelines(json.dumps(asdict(score), ensure_ascii=False).encode() + b"\n" for score in scores)
    return {
        "output": output, "lines": len(texts), "tokens": tokens,
        "truncated_lines": sum(score.truncated for score in scores),
        "pseudo_perplexity": math.exp(-sum(score.score for score in scores) / tokens),
    }  # fmt: skip
