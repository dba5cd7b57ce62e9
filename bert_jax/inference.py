"""A trained model in one line, and the masked words it would fill in."""

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

    def batch(self, input_ids: np.ndarray, token_type_ids: np.ndarray) -> dict[str, jax.Array]:
        """What the encoder reads for one sequence: ids [L] to arrays [1, L]."""
        length = len(input_ids)
        if length > self.config.max_position_embeddings:
            raise InputError(
                f"the text is {length} tokens long, the model reads {self.config.max_position_embeddings}: shorten it"
            )
        return {
            "input_ids": jnp.asarray(input_ids, jnp.int32)[None],
            "token_type_ids": jnp.asarray(token_type_ids, jnp.int32)[None],
            "positions": jnp.arange(length)[None],
            "sequence_ids": jnp.ones((1, length), jnp.int32),
            "cls_positions": jnp.zeros((1, 1), jnp.int32),
        }


def load(checkpoint: str) -> PreTrained:
    """The model of a CHECKPOINT (a workdir or one of its checkpoints/STEP), in fp32 on the first device.

    Raises InputError where there is none.
    """
    found = open_checkpoint(checkpoint)
    graph, _, _ = abstract_parameters(found.bert_config)
    return PreTrained(nnx.merge(graph, found.load_parameters()), found.tokenizer, found.bert_config)


@dataclass(frozen=True)
class Filling:
    """One candidate for one [MASK]: the piece, its probability, and the text with it in the mask's place."""

    token: str
    probability: float
    text: str


def check_mask(text: str) -> None:
    """InputError where `text` has no [MASK]."""
    if "[MASK]" not in text:
        raise InputError(f"there is no [MASK] in {text!r}: put one where a word is to be filled in")


def fill_mask(pretrained: PreTrained, text: str, top: int = 5) -> list[list[Filling]]:
    """The `top` most probable fillings of each [MASK] in `text`, masks in order, best first.

    Each mask is filled on its own, the others left as they are. InputError where there is no [MASK].
    """
    tokenizer = pretrained.tokenizer
    ids, token_type_ids = tokenizer.encode_with_special_tokens(text)
    check_mask(text)
    positions = [position for position, token in enumerate(ids) if token == tokenizer.mask_id]
    if not 1 <= top <= tokenizer.vocab_size:
        raise InputError(f"--top is 1 to {tokenizer.vocab_size}, not {top}")
    batch = pretrained.batch(np.array(ids), np.array(token_type_ids))
    logits, _ = pretrained.model({**batch, "masked_positions": jnp.asarray(positions)[None]})
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
