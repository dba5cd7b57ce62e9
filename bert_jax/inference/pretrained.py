"""Loads a trained model in one line; predicts with a fine-tuned one, and fills in masks with a pre-trained one."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bert_jax.batch import Batch, map_arrays
from bert_jax.errors import InputError
from bert_jax.finetuning.batches import EncodedExamples
from bert_jax.finetuning.fine_tuned import open_model, predict_texts
from bert_jax.finetuning.forward import LoadedModel, load_model
from bert_jax.inference.opening import open_model_of
from bert_jax.inference.text_encoder import Encoded, TextEncoder, check_segments, text_states
from bert_jax.model import BertConfig, BertForPreTraining
from bert_jax.model.bert import Parameters
from bert_jax.model.task_heads import BertForTask
from bert_jax.text.sequences import EncodedSequence, pad_sequences
from bert_jax.text.tokenizer import ROLES, Tokenizer
from bert_jax.training.checkpoints import Checkpoint


@dataclass(frozen=True)
class PreTrained:
    """A pre-trained or imported model, its tokenizer and its config.

    `model.encode(batch)` returns hidden states, and `model(batch)` the logits of both heads, None for a head that the
    checkpoint lacks.
    """

    model: BertForPreTraining
    tokenizer: Tokenizer
    config: BertConfig
    _encoder: LoadedModel = field(repr=False)

    @functools.cached_property
    def _text_encoder(self) -> TextEncoder:
        return TextEncoder(self._encoder, self.tokenizer, self.config)

    def batch(self, text: str | Sequence[str], pair: str | Sequence[str] | None = None) -> Batch[jax.Array]:
        """Encodes one or several texts, each alone or followed by its `pair`, as the model's int32 input.

        Returns:
          `input_ids, token_type_ids, positions, sequence_ids` [B, L], padded to the longest, where sequence 0 is
          padding; `masked_positions` [B, L], every position, so that the masked-LM head predicts each;
          `cls_positions` [B, 1].

        Raises:
          InputError: no text, different numbers of texts and pairs, pairs for a model with one segment, or a text that
            is not UTF-8 or too long.
        """
        batch = _padded(self.tokenizer, _encode(self.tokenizer, self.config, text, pair), last_position=False)
        return {**batch, "masked_positions": batch["positions"]}

    def encode(
        self, text: str | Sequence[str], pair: str | Sequence[str] | None = None, *, batch_size: int = 32
    ) -> Encoded:
        """Returns the last layer's hidden states of one or several texts, each alone or with its `pair`.

        A text of more tokens than the model supports is truncated. InputError as `batch`, but for long texts.
        """
        return self._text_encoder.encode(*_paired(text, pair, one_pair=isinstance(pair, str)), batch_size)

    def embed(
        self, text: str | Sequence[str], pair: str | Sequence[str] | None = None, *, pool: str = "mean",
        batch_size: int = 32,
    ) -> np.ndarray:  # fmt: skip
        """Returns one vector per text, fp32 [N, hidden_size], from the last layer's hidden states.

        `pool` "mean" averages over all tokens, [CLS] and [SEP] included and padding excluded, as sentence-transformers
        does; "cls" takes [CLS]. A text of more tokens than the model supports is truncated. InputError as `batch`, but
        for long texts, and for an unknown `pool`.
        """
        return self._text_encoder.embed(*_paired(text, pair, one_pair=isinstance(pair, str)), pool, batch_size)

    def fill_mask(self, text: str, top: int = 5) -> "list[list[Filling]]":
        """Returns the `top` most probable fillings of each [MASK]; see the function `fill_mask`."""
        return fill_mask(self, text, top)


@dataclass(frozen=True)
class FineTuned:
    """A fine-tuned model, its tokenizer, its config, and the checkpoint's record of its task.

    `model(batch)` returns fp32 outputs by `record["kind"]`: classify [B, labels], regress [B, 1], choose [B, 1] with a
    row per ending, span [B, L, 2] (start and end), tag [B, L, tags]. `record` lists the names of labels ("classes") and
    tags by number.
    """

    model: BertForTask
    tokenizer: Tokenizer
    config: BertConfig
    record: Mapping[str, Any]
    _checkpoint: Checkpoint = field(repr=False)
    _running: LoadedModel = field(repr=False)

    @functools.cached_property
    def _text_encoder(self) -> TextEncoder:
        return TextEncoder(_load_encoder(self._checkpoint), self.tokenizer, self.config)

    def batch(self, text: str | Sequence[str], pair: str | Sequence[str] | None = None) -> Batch[jax.Array]:
        """Returns the arrays of `PreTrained.batch` without `masked_positions`."""
        sequences = _encode(self.tokenizer, self.config, text, pair)
        return _padded(self.tokenizer, sequences, last_position=self.config.is_decoder)

    def encode(
        self, text: str | Sequence[str], pair: str | Sequence[str] | None = None, *, batch_size: int = 32
    ) -> Encoded:
        """Returns the fine-tuned encoder's hidden states, as `PreTrained.encode` does."""
        return self._text_encoder.encode(*_paired(text, pair, one_pair=isinstance(pair, str)), batch_size)

    def embed(
        self, text: str | Sequence[str], pair: str | Sequence[str] | None = None, *, pool: str = "mean",
        batch_size: int = 32,
    ) -> np.ndarray:  # fmt: skip
        """Returns one vector per text from the fine-tuned encoder, as `PreTrained.embed` does."""
        return self._text_encoder.embed(*_paired(text, pair, one_pair=isinstance(pair, str)), pool, batch_size)

    def predict(self, text: str | Sequence[str], pair: Any = None) -> list[dict[str, Any]]:
        """Predicts one or several texts, each alone or with its `pair`; long texts are truncated as in training.

        For a tagger a text is a sentence with spaces between words; for SQuAD a question, and the pair its paragraph;
        for multiple choice the context, and the pair a list of endings.

        Returns:
          A dict for each text, as written by `bert-jax predict`. `prediction` is a label name, a score, the number of
          an ending, an answer, or the tags of `words`; some tasks add `probabilities`, `probability` or `null_odds`.

        Raises:
          InputError: no text, different numbers of texts and pairs, or unsupported by the task.
        """
        texts, pairs = _paired(text, pair, one_pair=isinstance(text, str))
        return predict_texts(self._checkpoint, self._running, texts, pairs)


def load(checkpoint: str, *, step: int | None = None) -> PreTrained | FineTuned:
    """Loads a model in fp32 on the first device.

    Args:
      checkpoint: a workdir (its newest step, or with `keep_best` its best), one of its checkpoints/STEP, the output of
        `bert-jax import`; or, without an import, a folder of `transformers`, such as the output of `bert-jax export`,
        or a TensorFlow checkpoint: its folder or its prefix. Nothing is written.
      step: chooses a step of a workdir.

    Returns:
      A `PreTrained`, or a `FineTuned` for a fine-tuned model.

    Raises:
      InputError: there is no such model, or it cannot be read. The name of a model on the Hugging Face Hub is not
        downloaded.
    """
    found = open_model_of(checkpoint, step)
    if found.task is not None:
        running = open_model(found, dtype="float32", devices=jax.local_devices()[:1])
        model = nnx.merge(running.predictor.graph, running.parameters)
        return FineTuned(model, found.tokenizer, found.bert_config, found.task, found, running)
    encoder = _load_encoder(found)
    return PreTrained(
        nnx.merge(encoder.predictor.graph, encoder.parameters), found.tokenizer, found.bert_config, encoder
    )


def _load_encoder(found: Checkpoint) -> LoadedModel:
    """Loads the encoder and the pre-training heads, to compute hidden states [T, D] of one text at a time."""
    return load_model(
        found, batch_size=1, max_seq_len=found.bert_config.max_position_embeddings, devices=jax.local_devices()[:1],
        forward=text_states(""),
    )  # fmt: skip


def _paired(text: str | Sequence[str], pair: Any, *, one_pair: bool) -> tuple[list[str], list[Any]]:
    """Returns lists of texts and of pairs or Nones. InputError if there is no text, or the numbers differ."""
    texts = [text] if isinstance(text, str) else list(text)
    pairs = [None] * len(texts) if pair is None else [pair] if one_pair or isinstance(pair, str) else list(pair)
    if not texts or len(pairs) != len(texts):
        raise InputError(
            f"got {len(texts)} texts with {len(pairs)} pairs; expected at least one text, and as many pairs or none"
        )
    for given in (*texts, *(second for second in pairs if isinstance(second, str))):
        check_text(given)
    return texts, pairs


def _encode(
    tokenizer: Tokenizer, config: BertConfig, text: str | Sequence[str], pair: str | Sequence[str] | None
) -> list[EncodedSequence]:
    texts, pairs = _paired(text, pair, one_pair=isinstance(pair, str))
    check_segments(config, pairs)
    encoded = [tokenizer.encode_with_special_tokens(*both) for both in zip(texts, pairs, strict=True)]
    length = max(len(ids) for ids, _ in encoded)
    if length > config.max_position_embeddings:
        raise InputError(
            f"text too long: got {length} tokens, the model reads at most {config.max_position_embeddings}; shorten it"
        )
    return [EncodedSequence(tuple(ids), types.count(0)) for ids, types in encoded]


def _padded(tokenizer: Tokenizer, sequences: Sequence[EncodedSequence], *, last_position: bool) -> Batch[jax.Array]:
    longest = max(len(sequence.input_ids) for sequence in sequences)
    batch = pad_sequences(sequences, len(sequences), longest, tokenizer.pad_id, last_position=last_position)
    return map_arrays(jnp.asarray, batch)


@dataclass(frozen=True)
class Filling:
    """One candidate for one [MASK]: the piece, its probability, and the text with it in the mask's place."""

    token: str
    probability: float
    text: str


@functools.partial(jax.jit, static_argnums=(0, 3))
def top_words(
    graph: nnx.GraphDef[Any], parameters: Parameters, hidden: jax.Array, top: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the probabilities and ids of the `top` words, each [N, top], for the hidden states [N, D] of masks."""
    model = nnx.merge(graph, parameters)
    projection = model.mlm_head(hidden[None], jnp.arange(len(hidden))[None], model.embeddings.word[...])
    return jax.lax.top_k(jax.nn.softmax(projection.logits()[0], axis=-1), top)


def check_text(text: str) -> None:
    """Raises InputError if `text` is not UTF-8, which is possible for a command's argument."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"text {text!r}: expected valid UTF-8; convert it") from error


def check_mask(text: str, tokenizer: Tokenizer) -> None:
    """Raises InputError if `text` has no mask token of the tokenizer, or is not UTF-8."""
    check_text(text)
    mask = tokenizer.special_tokens[ROLES.index("mask")]
    if mask not in text:
        raise InputError(f"{mask} not found in {text!r}; write it in place of the word to predict")


def fill_mask(pretrained: PreTrained | FineTuned, text: str, top: int = 5) -> list[list[Filling]]:
    """Returns the `top` most probable fillings of each [MASK] in `text`: masks in order, best filling first.

    Each mask is filled independently, and the other masks are kept. InputError if there is no [MASK], or no mlm_head.
    """
    tokenizer = pretrained.tokenizer
    check_mask(text, tokenizer)
    if isinstance(pretrained, FineTuned):
        raise InputError(
            "fill-mask requires an mlm_head, which a fine-tuned checkpoint lacks; use a pre-trained checkpoint"
        )
    if pretrained.config.is_decoder:
        raise InputError("fill-mask does not support a left-to-right model, which cannot use the text after a mask")
    (sequence,) = _encode(tokenizer, pretrained.config, text, None)
    ids = sequence.input_ids
    positions = [position for position, token in enumerate(ids) if token == tokenizer.mask_id]
    if not 1 <= top <= tokenizer.vocab_size:
        raise InputError(f"--top={top}: expected 1 to {tokenizer.vocab_size}")
    model = pretrained.model
    if model.mlm_head is None:
        raise InputError("fill-mask requires an mlm_head, which the checkpoint lacks; use another checkpoint")
    encoder = pretrained._encoder
    (hidden,) = encoder.outputs(EncodedExamples([sequence], None))
    probabilities, tokens = jax.device_get(
        top_words(encoder.predictor.graph, encoder.parameters, hidden[positions], top)
    )
    fillings = []
    for position, row_probabilities, row_tokens in zip(positions, probabilities, tokens, strict=True):
        row = []
        for probability, token in zip(row_probabilities.tolist(), row_tokens.tolist(), strict=True):
            filled = [*ids[1:position], token, *ids[position + 1 : -1]]
            row.append(Filling(tokenizer.id_to_token(token), probability, tokenizer.decode(filled)))
        fillings.append(row)
    return fillings
