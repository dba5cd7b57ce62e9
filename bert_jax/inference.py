"""A trained model in one line, and the masked words it would fill in."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bert_jax.data.tokenization import WordPieceTokenizer
from bert_jax.errors import InputError
from bert_jax.model import BertConfig, BertForPreTraining, abstract_parameters
from bert_jax.training.checkpoints import open_checkpoint


@dataclass(frozen=True)
class PreTrained:
    """A model, its tokenizer and its config."""

    model: BertForPreTraining
    tokenizer: WordPieceTokenizer
    config: BertConfig

    def batch(self, text: str | Sequence[str], pair: str | Sequence[str] | None = None) -> dict[str, jax.Array]:
        """What the model reads, for one text or several, each alone or followed by its `pair`: int32 arrays.

        Returns:
          `input_ids, token_type_ids, positions, sequence_ids` [B, L], padded to the longest, where sequence 0 is
          padding; `masked_positions` [B, L], every position, so that the masked-LM head predicts each;
          `cls_positions` [B, 1].

        Raises:
          InputError: no text, not as many pairs as texts, pairs for a model of one segment, a text that is not UTF-8
            or longer than the model reads.
        """
        texts = [text] if isinstance(text, str) else list(text)
        pairs = [pair] if isinstance(pair, str) else [None] * len(texts) if pair is None else list(pair)
        if not texts or len(pairs) != len(texts):
            raise InputError(f"{len(texts)} texts with {len(pairs)} pairs: give one text or more, each with its pair")
        if self.config.type_vocab_size < 2 and any(second is not None for second in pairs):
            raise InputError("a pair of texts, but the model has no second segment (type_vocab_size 1): give one text")
        for given in (*texts, *(second for second in pairs if second is not None)):
            check_text(given)
        encoded = [self.tokenizer.encode_with_special_tokens(*both) for both in zip(texts, pairs, strict=True)]
        length = max(len(ids) for ids, _ in encoded)
        if length > self.config.max_position_embeddings:
            raise InputError(
                f"the text is {length} tokens long, the model reads {self.config.max_position_embeddings}: shorten it"
            )
        input_ids = np.full((len(texts), length), self.tokenizer.pad_id, np.int32)
        token_type_ids, sequence_ids = np.zeros((2, *input_ids.shape), np.int32)
        for row, (ids, types) in enumerate(encoded):
            input_ids[row, : len(ids)], token_type_ids[row, : len(ids)], sequence_ids[row, : len(ids)] = ids, types, 1
        positions = np.tile(np.arange(length, dtype=np.int32), (len(texts), 1))
        return {
            "input_ids": jnp.asarray(input_ids),
            "token_type_ids": jnp.asarray(token_type_ids),
            "positions": jnp.asarray(positions),
            "sequence_ids": jnp.asarray(sequence_ids),
            "masked_positions": jnp.asarray(positions),
            "cls_positions": jnp.zeros((len(texts), 1), jnp.int32),
        }


def load(checkpoint: str) -> PreTrained:
    """The model of a CHECKPOINT (a workdir, one of its checkpoints/STEP, or imported), in fp32 on the first device.

    Its `encode(batch)` gives hidden states, and `model(batch)` the logits of both heads, None for one that the
    checkpoint lacks. Raises InputError where there is no checkpoint.
    """
    found = open_checkpoint(checkpoint)
    graph, _, _ = abstract_parameters(found.bert_config, heads=found.heads)
    return PreTrained(nnx.merge(graph, found.load_parameters()), found.tokenizer, found.bert_config)


@dataclass(frozen=True)
class Filling:
    """One candidate for one [MASK]: the piece, its probability, and the text with it in the mask's place."""

    token: str
    probability: float
    text: str


def check_text(text: str) -> None:
    """InputError where `text` is not UTF-8, as an argument of a command may be."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the text {text!r} is not valid UTF-8: convert it") from error


def check_mask(text: str) -> None:
    """InputError where `text` has no [MASK], or is not UTF-8."""
    check_text(text)
    if "[MASK]" not in text:
        raise InputError(f"there is no [MASK] in {text!r}: put one where a word is to be filled in")


def fill_mask(pretrained: PreTrained, text: str, top: int = 5) -> list[list[Filling]]:
    """The `top` most probable fillings of each [MASK] in `text`, masks in order, best first.

    Each mask is filled on its own, the others left as they are. InputError where there is no [MASK], or no head to
    fill it in.
    """
    tokenizer = pretrained.tokenizer
    check_mask(text)
    if pretrained.config.is_decoder:
        raise InputError("the checkpoint is a left-to-right model: it cannot fill in a mask from both sides")
    batch = pretrained.batch(text)
    ids = batch["input_ids"][0].tolist()
    positions = [position for position, token in enumerate(ids) if token == tokenizer.mask_id]
    if not 1 <= top <= tokenizer.vocab_size:
        raise InputError(f"--top is 1 to {tokenizer.vocab_size}, not {top}")
    logits, _ = pretrained.model({**batch, "masked_positions": jnp.asarray(positions)[None]})
    if logits is None:
        raise InputError("the checkpoint has no mlm_head, which fills in masks")
    probabilities, tokens = jax.lax.top_k(jax.nn.softmax(logits[0], axis=-1), top)
    fillings = []
    for position, row_probabilities, row_tokens in zip(
        positions, np.asarray(probabilities), np.asarray(tokens), strict=True
    ):
        row = []
        for probability, token in zip(row_probabilities.tolist(), row_tokens.tolist(), strict=True):
            filled = [*ids[1:position], token, *ids[position + 1 : -1]]
            row.append(Filling(tokenizer.id_to_token(token), probability, tokenizer.decode(filled)))
        fillings.append(row)
    return fillings
