"""BERT with one output of a task on top, as the paper fine-tunes it (its section 4 and figure 4)."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.model.bilstm import BiLstm
from bert_jax.model.config import BertConfig
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import Pooler
from bert_jax.model.layers import Key, dropout, parameter, row_keys, split_keys, truncated_normal

KINDS = ("classify", "regress", "choose", "span", "tag")


@dataclass(frozen=True)
class TaskHead:
    """What a task wants of the encoder.

    Attributes:
      kind: `classify` a sequence, `regress` a number of it, `choose` among several sequences, find a `span` of it, or
        `tag` its tokens.
      size: labels of `classify` and `tag`; choices of `choose`; 1 for `regress` and 2 for `span`, its start and end.
      dropout: of what the output layer reads.
      bilstm: units, in each direction, of a BiLSTM between the encoder and the output; 0 is none.
    """

    kind: str
    size: int
    dropout: float = 0.1
    bilstm: int = 0

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    @property
    def outputs(self) -> int:
        """Numbers that the output layer gives, for a sequence or for a token."""
        return 1 if self.kind == "choose" else self.size

    @property
    def is_of_tokens(self) -> bool:
        """Whether every token has outputs of its own."""
        return self.kind in ("span", "tag")


class BertForTask(nnx.Module):
    """Encoder, and a dense layer on each token or on the pooled sequence.

    A sequence is pooled as in pre-training, from the position that `cls_positions` names; on top of a BiLSTM it is the
    two final states. `fetch_layer` and the like: see `BertForPreTraining`.
    """

    def __init__(
        self,
        config: BertConfig,
        *,
        key: Key,
        head: TaskHead,
        dtype: jnp.dtype = jnp.float32,
        attention: str = "xla",
        remat: str = "none",
        scan_layers: bool = True,
    ):
        """`dtype` is what is computed in; parameters are fp32. The rest: see `Encoder`."""
        embeddings, encoder, pooler, bilstm, output = jax.random.split(key, 5)
        self.embeddings = Embeddings(config, key=embeddings)
        self.encoder = Encoder(config, key=encoder, attention=attention, remat=remat, scan_layers=scan_layers)
        pools = not head.is_of_tokens and not head.bilstm
        self.pooler = Pooler(config, key=pooler) if pools else None
        self.bilstm = BiLstm(config.hidden_size, head.bilstm, key=bilstm) if head.bilstm else None
        size = 2 * head.bilstm if head.bilstm else config.hidden_size
        self.output = Output(size, head.outputs, config.initializer_range, key=output)
        self.head = head
        self.config = config
        self.dtype = dtype

    def __call__(self, batch: Mapping[str, jax.Array], key: Key | None = None) -> jax.Array:
        """fp32 outputs [B, outputs], or [B, L, outputs] of tokens, for the arrays that `BertForPreTraining` reads.

        With a key, or with keys [B] of the rows, dropout is on.
        """
        if key is not None and not key.ndim:
            key = row_keys(key, jnp.arange(batch["input_ids"].shape[0]))
        embeddings_key, encoder_key, head_key = split_keys(key, 3)
        x = self.embeddings(
            batch["input_ids"], batch["token_type_ids"], batch["positions"], dtype=self.dtype, key=embeddings_key
        )
        x, _ = self.encoder(x, batch["sequence_ids"], encoder_key)
        if self.bilstm is not None:
            tokens, sequence = self.bilstm(x, batch["sequence_ids"] > 0)
            x = tokens if self.head.is_of_tokens else sequence
        elif self.pooler is not None:
            x = self.pooler(x, batch["cls_positions"])[:, 0]
        return self.output(dropout(x, self.head.dropout, head_key))


class Output(nnx.Module):
    """A dense layer to fp32."""

    def __init__(self, size: int, outputs: int, initializer_range: float, *, key: Key):
        self.kernel = parameter(truncated_normal(key, (size, outputs), initializer_range), "embed", None)
        self.bias = parameter(jnp.zeros(outputs, jnp.float32), None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to fp32 [..., outputs]."""
        kernel = self.kernel[...].astype(x.dtype)
        return jnp.einsum("...d,do->...o", x, kernel, preferred_element_type=jnp.float32) + self.bias[...]
