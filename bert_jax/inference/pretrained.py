"""Loads a trained model in one line: hidden states, vectors and predictions of texts, and fillings of masks."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bert_jax.batch import Batch, map_arrays
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.finetuning.batches import EncodedExamples, Forward, LoadedModel, check_segments, load_model
from bert_jax.finetuning.fine_tuned import open_model, predict_texts
from bert_jax.inference.scores import Masking, Score, check_masked_lm, score_texts, target_log_probabilities
from bert_jax.interop.importing import holds_model, open_source
from bert_jax.model import BertConfig
from bert_jax.model.bert import Parameters
from bert_jax.text.sequences import EncodedSequence, encode_sequence, pad_sequences
from bert_jax.text.tokenizer import ROLES, Tokenizer
from bert_jax.training.checkpoints import Checkpoint, is_checkpoint, may_hold_checkpoints, open_checkpoint
from bert_jax.training.evaluation import check_batch_size

POOLS = ("mean", "cls")
"""Poolings of hidden states to one vector: see `pool_hidden_states`."""

Texts = str | Sequence[str]
Pairs = str | Sequence[str | None] | None


@dataclass(frozen=True)
class Encoded:
    """Hidden states of N texts, padded to the L tokens of the longest.

    Attributes:
      hidden_states: fp32 [N, L, D], of the last layer; zeros at padding.
      mask: bool [N, L], False at padding. Special tokens are True.
      input_ids: int32 [N, L].
    """

    hidden_states: np.ndarray
    mask: np.ndarray
    input_ids: np.ndarray


def pool_hidden_states(hidden: jax.Array, batch: Batch[jax.Array], pool: str) -> jax.Array:
    """Reduces hidden states [B, L, ...] to fp32 [B, ...].

    "mean" averages over all tokens but padding, [CLS] and [SEP] included, as sentence-transformers does with the
    attention mask. "cls" takes the first token.
    """
    if pool == "cls":
        return hidden[:, 0].astype(jnp.float32)
    mask = (batch["sequence_ids"] > 0).astype(jnp.float32)
    mask = mask.reshape(*mask.shape, *[1] * (hidden.ndim - 2))
    return (hidden.astype(jnp.float32) * mask).sum(axis=1) / mask.sum(axis=1)


@functools.cache
def text_states(pool: str) -> Callable[[Any, Batch[jax.Array]], jax.Array]:
    """Makes the forward pass that returns the hidden states of texts, or one vector of each by `pool`."""

    def encode_texts(model: Any, batch: Batch[jax.Array]) -> jax.Array:
        hidden, _ = model.encode(batch)
        return pool_hidden_states(hidden, batch, pool) if pool else hidden

    return encode_texts


def check_text(text: Any) -> None:
    """Raises InputError if `text` is not a str, or not UTF-8, which is possible for a command's argument."""
    if not isinstance(text, str):
        raise InputError(f"text={text!r:.60}: expected a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"text {text!r}: expected valid UTF-8; convert it") from error


def align_pairs(text: Texts, pair: Any) -> tuple[list[str], list[Any]]:
    """Returns lists of texts and of pairs or Nones. InputError if there is no text, or the numbers differ."""
    texts = [text] if isinstance(text, str) else list(text)
    pairs = [None] * len(texts) if pair is None else [pair] if isinstance(pair, str) else list(pair)
    if not texts or len(pairs) != len(texts):
        raise InputError(
            f"got {len(texts)} texts with {len(pairs)} pairs; expected at least one text, and as many pairs or none"
        )
    for one in texts:
        check_text(one)
    return texts, pairs


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


@dataclass(frozen=True)
class TextModel:
    """A loaded model, its tokenizer and its config; the base of `PreTrained` and `FineTuned`.

    A special token in a text, such as [MASK], is this token, and not its characters.
    """

    model: Any
    tokenizer: Tokenizer
    config: BertConfig
    _running: LoadedModel = field(repr=False)
    _by_forward: dict[tuple[Forward, int], LoadedModel] = field(default_factory=dict, repr=False, kw_only=True)

    def batch(self, text: Texts, pair: Pairs = None) -> Batch[jax.Array]:
        """Encodes one or several texts, each alone or followed by its `pair`, as the model's int32 input.

        Returns:
          `input_ids, token_type_ids, positions, sequence_ids` [B, L], padded to the longest, where sequence 0 is
          padding; `cls_positions` [B, 1]; for a pre-trained model also `masked_positions` [B, L], every position, so
          that the masked-LM head predicts each.

        Raises:
          InputError: no text, different numbers of texts and pairs, pairs for a model with one segment, or a text that
            is not UTF-8 or too long.
        """
        sequences = self._sequences(text, pair)
        longest, limit = max(len(sequence.input_ids) for sequence in sequences), self.config.max_position_embeddings
        if longest > limit:
            raise InputError(f"text too long: got {longest} tokens, the model reads at most {limit}; shorten it")
        batch = pad_sequences(
            sequences, len(sequences), longest, self.tokenizer.pad_id, last_position=self.config.is_decoder
        )
        return map_arrays(jax.device_put, batch)

    def encode(self, text: Texts, pair: Pairs = None, *, batch_size: int = 32) -> Encoded:
        """Returns the last layer's hidden states of one or several texts, each alone or with its `pair`.

        A text of more tokens than the model supports is truncated. InputError as `batch`, but for long texts.
        """
        sequences = self._sequences(text, pair, self.config.max_position_embeddings)
        longest = max(len(sequence.input_ids) for sequence in sequences)
        states = self._runner(text_states(""), batch_size).outputs(EncodedExamples(sequences))
        hidden = np.zeros((len(sequences), longest, self.config.hidden_size), np.float32)
        input_ids = np.full((len(sequences), longest), self.tokenizer.pad_id, np.int32)
        mask = np.zeros((len(sequences), longest), bool)
        for row, (sequence, text_hidden) in enumerate(zip(sequences, states, strict=True)):
            length = len(sequence.input_ids)
            hidden[row, :length], input_ids[row, :length], mask[row, :length] = text_hidden, sequence.input_ids, True
        return Encoded(hidden, mask, input_ids)

    def embed(self, text: Texts, pair: Pairs = None, *, pool: str = "mean", batch_size: int = 32) -> np.ndarray:
        """Returns one vector per text, fp32 [N, hidden_size], from the last layer's hidden states.

        `pool` "mean" averages over all tokens, [CLS] and [SEP] included and padding excluded, as sentence-transformers
        does; "cls" takes [CLS]. A text of more tokens than the model supports is truncated. InputError as `batch`, but
        for long texts, and for an unknown `pool`.
        """
        if pool not in POOLS:
            raise InputError(f"pool={pool}: expected {' or '.join(POOLS)}")
        if pool == "cls" and self.config.is_decoder:
            raise InputError("pool=cls: the [CLS] of a left-to-right model attends to itself alone; use pool=mean")
        sequences = self._sequences(text, pair, self.config.max_position_embeddings)
        return np.stack(self._runner(text_states(pool), batch_size).outputs(EncodedExamples(sequences)))

    def score(self, text: Texts, *, masking: Masking = "token", batch_size: int = 32) -> list[Score]:
        """Returns the pseudo-log-likelihood of one or several texts, in nats; see `bert_jax/inference/scores.py`.

        A text of n tokens takes n forward passes: each token is masked in turn, and with `masking` "within_word_l2r"
        the later tokens of its word with it. A text of more tokens than the model supports is truncated. A special
        token in a text is plain text. InputError if there is no text, or no mlm_head.
        """
        texts, _ = align_pairs(text, None)
        check_masked_lm("score", getattr(self.model, "mlm_head", None) is not None, self.config)
        return score_texts(self._runner(target_log_probabilities, batch_size), texts, masking)

    def fill_mask(self, text: str, top: int = 5) -> list[list[Filling]]:
        """Returns the `top` most probable fillings of each [MASK] in `text`: masks in order, best filling first.

        Each mask is filled independently, and the other masks are kept. InputError if there is no [MASK], or no
        mlm_head.
        """
        tokenizer, running = self.tokenizer, self._running
        check_text(text)
        mask = tokenizer.special_tokens[ROLES.index("mask")]
        if mask not in text:
            raise InputError(f"{mask} not found in {text!r}; write it in place of the word to predict")
        check_masked_lm("fill-mask", getattr(self.model, "mlm_head", None) is not None, self.config)
        ids = np.asarray(self.batch(text)["input_ids"])[0].tolist()  # refuses a text that is too long
        positions = [position for position, token in enumerate(ids) if token == tokenizer.mask_id]
        if not 1 <= top <= tokenizer.vocab_size:
            raise InputError(f"top={top}: expected 1 to {tokenizer.vocab_size}")
        hidden = self.encode(text, batch_size=1).hidden_states[0]
        probabilities, tokens = jax.device_get(
            top_words(running.predictor.graph, running.parameters, hidden[positions], top)
        )
        fillings = []
        for position, row_probabilities, row_tokens in zip(positions, probabilities, tokens, strict=True):
            row = []
            for probability, token in zip(row_probabilities.tolist(), row_tokens.tolist(), strict=True):
                filled = [*ids[1:position], token, *ids[position + 1 : -1]]
                row.append(Filling(tokenizer.id_to_token(token), probability, tokenizer.decode(filled)))
            fillings.append(row)
        return fillings

    def _sequences(self, text: Texts, pair: Pairs, max_seq_len: int | None = None) -> list[EncodedSequence]:
        """Encodes texts, truncated to at most `max_seq_len` tokens, a pair at the end of its longer text."""
        sequences = []
        for first, second in zip(*align_pairs(text, pair), strict=True):
            if second is not None:
                check_text(second)
            ids, segments = self.tokenizer.encode_with_special_tokens(first, second)
            end = segments.count(0)
            words, more = ids[1 : end - 1], None if second is None else ids[end:-1]
            sequences.append(encode_sequence(self.tokenizer, words, more, max_seq_len or len(ids)))
        check_segments(self.config.type_vocab_size, sequences)
        return sequences

    def _runner(self, forward: Forward, batch_size: int) -> LoadedModel:
        """Returns what runs `forward`. It compiles one program per padded length and size of batches."""
        check_batch_size(batch_size)
        if (forward, batch_size) not in self._by_forward:
            predictor = dataclasses.replace(
                self._running.predictor, forward=forward, batch_size=batch_size,
                max_seq_len=self.config.max_position_embeddings,
            )  # fmt: skip
            self._by_forward[forward, batch_size] = dataclasses.replace(self._running, predictor=predictor)
        return self._by_forward[forward, batch_size]


# --- Pre-trained and fine-tuned models --------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreTrained(TextModel):
    """A pre-trained or imported model, its tokenizer and its config.

    `model.encode(batch)` returns hidden states, and `model(batch)` the logits of both heads, None for a head that the
    checkpoint lacks.
    """

    def batch(self, text: Texts, pair: Pairs = None) -> Batch[jax.Array]:
        batch = super().batch(text, pair)
        return {**batch, "masked_positions": batch["positions"]}


@dataclass(frozen=True)
class FineTuned(TextModel):
    """A fine-tuned model, its tokenizer, its config, and the checkpoint's record of its task.

    `model(batch)` returns fp32 outputs by `record["kind"]`: classify [B, labels], regress [B, 1], choose [B, 1] with a
    row per ending, span [B, L, 2] (start and end), tag [B, L, tags]. `record` lists the names of labels ("classes") and
    tags by number.
    """

    record: Mapping[str, Any]
    _checkpoint: Checkpoint = field(repr=False)

    def predict(self, text: Texts, pair: Any = None) -> list[dict[str, Any]]:
        """Predicts one or several texts, each alone or with its `pair`; long texts are truncated as in training.

        For a tagger a text is a sentence with spaces between words; for SQuAD a question, and the pair its paragraph;
        for multiple choice the context, and the pair a list of endings. A special token in a text is plain text.

        Returns:
          A dict for each text, as written by `bert-jax predict`. `prediction` is a label name, a score, the number of
          an ending, an answer, or the tags of `words`; some tasks add `probabilities`, `probability` or `null_odds`.

        Raises:
          InputError: no text, different numbers of texts and pairs, or unsupported by the task.
        """
        texts, pairs = align_pairs(text, [pair] if isinstance(text, str) and pair is not None else pair)
        for one in pairs:
            for part in one if self.record["kind"] == "choose" and isinstance(one, (list, tuple)) else [one]:
                if part is not None:
                    check_text(part)
        return predict_texts(self._checkpoint, self._running, texts, pairs)


def open_model_of(location: str) -> Checkpoint:
    """Opens a MODEL; its parameters are loaded on demand, straight from its files.

    Args:
      location: a workdir (its newest step), one of its checkpoints/STEP, the output of `bert-jax import`; or what
        import reads: a folder of `transformers` such as the output of `bert-jax export`, or a TensorFlow checkpoint.

    Raises:
      InputError: there is no such model, or it cannot be read.
    """
    given = remote.parse_path(location)
    if not (may_hold_checkpoints(given) and is_checkpoint(given)) and holds_model(location):
        return open_source(location)
    return open_checkpoint(location)


def load(checkpoint: str) -> PreTrained | FineTuned:
    """Loads a model in fp32 on the first device.

    Args:
      checkpoint: a workdir (its newest step), one of its checkpoints/STEP, the output of `bert-jax import`; or,
        without an import, a folder of `transformers`, such as the output of `bert-jax export`, or a TensorFlow
        checkpoint: its folder or its prefix. Nothing is written.

    Returns:
      A `PreTrained`, or a `FineTuned` for a fine-tuned model.

    Raises:
      InputError: there is no such model, or it cannot be read. The name of a model on the Hugging Face Hub is not
        downloaded.
    """
    found = open_model_of(checkpoint)
    config, device = found.bert_config, jax.local_devices()[:1]
    if found.task is not None:
        running = open_model(found, dtype="float32", devices=device)
        model = nnx.merge(running.predictor.graph, running.parameters)
        return FineTuned(model, found.tokenizer, config, running, found.task, found)
    length, forward = config.max_position_embeddings, text_states("")
    running = load_model(found, batch_size=1, max_seq_len=length, devices=device, forward=forward)
    return PreTrained(nnx.merge(running.predictor.graph, running.parameters), found.tokenizer, config, running)
