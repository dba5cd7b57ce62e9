"""BERT with its two pre-training heads, and the functions that make and count its parameters."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.batch import Batch
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import MaskedLanguageModelHead, NextSentenceHead, Pooler
from bert_jax.model.layers import Key, row_keys, split_keys

Parameters = dict[str, Any]
"""A nested dict of arrays: the model's parameters by attribute name."""

HEADS = ("pooler", "mlm_head", "nsp_head")
"""The optional parts of a BERT; `nsp_head` reads the output of `pooler`."""


class BertForPreTraining(nnx.Module):
    """BERT: encoder, pooler, masked-LM head (output matrix tied to the word embeddings) and next-sentence head.

    A head that is not in `heads` is None.
    """

    def __init__(
        self,
        config: BertConfig,
        *,
        key: Key,
        dtype: jnp.dtype = jnp.float32,
        attention: str = "xla",
        remat: str = "none",
        scan_layers: bool = True,
        heads: Collection[str] = HEADS,
    ):
        """Initializes fp32 parameters; `dtype` is the type of the computation. For the rest see `Encoder`."""
        embeddings, encoder, pooler, mlm, nsp = jax.random.split(key, 5)
        self.embeddings = Embeddings(config, key=embeddings)
        self.encoder = Encoder(config, key=encoder, attention=attention, remat=remat, scan_layers=scan_layers)
        self.pooler = Pooler(config, key=pooler) if "pooler" in heads else None
        self.mlm_head = MaskedLanguageModelHead(config, key=mlm) if "mlm_head" in heads else None
        self.nsp_head = NextSentenceHead(config, key=nsp) if "nsp_head" in heads else None
        self.config = config
        self.dtype = dtype

    def encode(
        self, batch: Batch[jax.Array], key: Key | None = None, *, all_hidden_states: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        """Encodes `input_ids, token_type_ids, positions, sequence_ids`, int32 [B, L], to [B, L, D].

        A key, or one key per row [B], turns dropout on. With `all_hidden_states` it also returns every hidden state
        [layers + 1, B, L, D], the embeddings first.
        """
        if key is not None and not key.ndim:
            key = row_keys(key, jnp.arange(batch["input_ids"].shape[0]))
        embeddings_key, encoder_key = split_keys(key, 2)
        x = self.embeddings(
            batch["input_ids"], batch["token_type_ids"], batch["positions"], dtype=self.dtype, key=embeddings_key
        )
        last, hidden = self.encoder(x, batch["sequence_ids"], encoder_key, all_hidden_states=all_hidden_states)
        return last, None if hidden is None else jnp.concatenate([x[None], hidden])

    def __call__(self, batch: Batch[jax.Array], key: Key | None = None) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns fp32 logits of both heads: masked-LM [B, P, V] at `masked_positions`, next-sentence [B, K, 2].

        A missing head returns None.
        """
        x, _ = self.encode(batch, key)
        mlm_logits = nsp_logits = None
        if self.mlm_head is not None:
            mlm_logits = self.mlm_head(x, batch["masked_positions"], self.embeddings.word[...])
        if self.pooler is not None and self.nsp_head is not None:
            nsp_logits = self.nsp_head(self.pooler(x, batch["cls_positions"]))
        return mlm_logits, nsp_logits


def initialize(
    model_config: BertConfig, key: Key, *, build: Callable[..., nnx.Module] = BertForPreTraining, **settings: Any
) -> tuple[nnx.GraphDef, Parameters]:
    """Initializes a model and returns (graph, parameters); `settings` go to `build`, the model's class.

    `nnx.merge(graph, parameters)` returns the model. Works under `jax.jit` and `jax.eval_shape`.
    """
    graph, state = nnx.split(build(model_config, key=key, **settings))
    return graph, nnx.to_pure_dict(state)


def abstract_parameters(
    model_config: BertConfig, *, build: Callable[..., nnx.Module] = BertForPreTraining, **settings: Any
) -> tuple[nnx.GraphDef, Parameters, Parameters]:
    """Returns (graph, shapes, logical axes): two trees, of `jax.ShapeDtypeStruct`s and of axis names.

    Takes the arguments of `initialize`, without the key.
    """
    model = nnx.eval_shape(lambda: build(model_config, key=jax.random.key(0), **settings))
    graph, state = nnx.split(model)
    axes = jax.tree.map(
        lambda variable: variable.get_metadata("logical_axes"), state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return graph, nnx.to_pure_dict(state), nnx.to_pure_dict(axes)


def parameter_count(model_config: BertConfig) -> int:
    """Counts the parameters of the model, heads included, vocabulary padding excluded."""
    _, shapes, _ = abstract_parameters(model_config)
    padded = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    padding = model_config.padded_vocab_size - model_config.vocab_size
    return padded - padding * (model_config.hidden_size + 1)
