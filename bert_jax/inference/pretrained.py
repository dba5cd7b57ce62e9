"""Loads a trained model in one line; predicts with a fine-tuned one, and fills in masks with a pre-trained one."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.batch import Batch
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.finetuning.fine_tuned import open_model, predict_texts
from bert_jax.finetuning.forward import load_model
from bert_jax.inference.text_encoder import Pairs, TextModel, Texts, align_pairs, check_text, text_states
from bert_jax.interop.importing import holds_model, open_source
from bert_jax.model.bert import Parameters
from bert_jax.text.tokenizer import ROLES, Tokenizer
from bert_jax.training.checkpoints import Checkpoint, is_checkpoint, may_hold_checkpoints, open_checkpoint


@dataclass(frozen=True)
class PreTrained(TextModel):
    """A pre-trained or imported model, its tokenizer and its config.

    `model.encode(batch)` returns hidden states, and `model(batch)` the logits of both heads, None for a head that the
    checkpoint lacks.
    """

    def batch(self, text: Texts, pair: Pairs = None) -> Batch[jax.Array]:
        batch = super().batch(text, pair)
        return {**batch, "masked_positions": batch["positions"]}

    def fill_mask(self, text: str, top: int = 5) -> "list[list[Filling]]":
        """Returns the `top` most probable fillings of each [MASK]; see the function `fill_mask`."""
        return fill_mask(self, text, top)


@dataclass(frozen=True)
class FineTuned(TextModel):
    """A fine-tuned model, its tokenizer, its config, and the checkpoint's record of its task.

    `model(batch)` returns fp32 outputs by `record["kind"]`: classify [B, labels], regress [B, 1], choose [B, 1] with a
    row per ending, span [B, L, 2] (start and end), tag [B, L, tags]. `record` lists the names of labels ("classes") and
    tags by number.
    """

    record: Mapping[str, Any]
    _checkpoint: Checkpoint = field(repr=False)

    def _pools_last(self) -> bool:
        return self.config.is_decoder

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


def open_model_of(location: str, step: int | None = None) -> Checkpoint:
    """Opens a MODEL; its parameters are loaded on demand, straight from its files.

    Args:
      location: a workdir (its newest step, or with `keep_best` its best), one of its checkpoints/STEP, the output of
        `bert-jax import`; or what import reads: a folder of `transformers` such as the output of `bert-jax export`, or
        a TensorFlow checkpoint.
      step: chooses a step of a workdir.

    Raises:
      InputError: there is no such model, or it cannot be read.
    """
    given = remote.parse_path(location)
    if step is None and not (may_hold_checkpoints(given) and is_checkpoint(given)) and holds_model(location):
        return open_source(location)
    return open_checkpoint(location, step)


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
    config, device = found.bert_config, jax.local_devices()[:1]
    if found.task is not None:
        running = open_model(found, dtype="float32", devices=device)
        model = nnx.merge(running.predictor.graph, running.parameters)
        return FineTuned(model, found.tokenizer, config, running, found.task, found)
    length, forward = config.max_position_embeddings, text_states("")
    running = load_model(found, batch_size=1, max_seq_len=length, devices=device, forward=forward)
    return PreTrained(nnx.merge(running.predictor.graph, running.parameters), found.tokenizer, config, running)


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
    ids = pretrained.batch(text)["input_ids"][0].tolist()  # refuses a text that is too long
    positions = [position for position, token in enumerate(ids) if token == tokenizer.mask_id]
    if not 1 <= top <= tokenizer.vocab_size:
        raise InputError(f"top={top}: expected 1 to {tokenizer.vocab_size}")
    model = pretrained.model
    if model.mlm_head is None:
        raise InputError("fill-mask requires an mlm_head, which the checkpoint lacks; use another checkpoint")
    hidden, running = pretrained.encode(text, batch_size=1).hidden_states[0], pretrained._running
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
