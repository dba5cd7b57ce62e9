"""BERT with one output of a task on top, fine-tuned with it (the paper's section 4 and figure 4) or frozen (5.3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.bilstm import BiLstm
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import Pooler
from bert_jax.model.layer_features import FEATURES, LayerMix, feature_size, is_mixed, layers_of
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
      bilstm_layers: of that BiLSTM; there is `dropout` between them, too.
      features: which of `FEATURES` a frozen encoder gives to what is on top of it; "" is its last hidden state, and the
        encoder is fine-tuned.
    """

    kind: str
    size: int
    dropout: float = 0.1
    bilstm: int = 0
    bilstm_layers: int = 1
    features: str = ""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert self.features in ("", *FEATURES), self.features

    @classmethod
    def of_checkpoint(cls, task: Mapping[str, Any]) -> "TaskHead":
        """The head of a checkpoint's `task`, as `about` has it there; dropout is not known of it.

        What older checkpoints do not say of themselves they do not have.
        """
        return cls(**{name: task[name] for name in _IN_CHECKPOINTS if name in task})

    def about(self) -> dict[str, Any]:
        """What has to be known to build the model again, as JSON."""
        return {name: getattr(self, name) for name in _IN_CHECKPOINTS}

    @property
    def frozen(self) -> tuple[str, ...]:
        """The parts of `BertForTask` that are not trained."""
        return ("embeddings", "encoder") if self.features else ()

    @property
    def outputs(self) -> int:
        """Numbers that the output layer gives, for a sequence or for a token."""
        return 1 if self.kind == "choose" else self.size

    @property
    def is_of_tokens(self) -> bool:
        """Whether every token has outputs of its own."""
        return self.kind in ("span", "tag")


_IN_CHECKPOINTS = ("kind", "size", "bilstm", "bilstm_layers", "features")


class BertForTask(nnx.Module):
    """Encoder, and a dense layer on each token or on the pooled sequence.

    A sequence is pooled as in pre-training, from the position that `cls_positions` names; on top of a BiLSTM it is the
    two final states, and of a frozen encoder without one the features at that position. A frozen encoder has no
    dropout. `fetch_layer` and the like: see `BertForPreTraining`.
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
        self.mix = LayerMix(len(layers_of(head.features, config))) if is_mixed(head.features) else None
        pools = not head.is_of_tokens and not head.bilstm and not head.features
        self.pooler = Pooler(config, key=pooler) if pools else None
        size = feature_size(head.features, config)
        self.bilstm = (
            BiLstm(size, head.bilstm, key=bilstm, layers=head.bilstm_layers, dropout=head.dropout)
            if head.bilstm else None
        )  # fmt: skip
        self.output = Output(2 * head.bilstm or size, head.outputs, config.initializer_range, key=output)
        self.head = head
        self.config = config
        self.dtype = dtype

    def encode(self, batch: Mapping[str, jax.Array], keys: Key | None = None) -> jax.Array:
        """What the head reads of the encoder: [B, L, D], or [B, L, 4 D] of four layers, the last one first.

        With keys [B] of the rows, dropout is on.
        """
        features = self.head.features
        embeddings_key, encoder_key = split_keys(None if features else keys, 2)
        x = self.embeddings(
            batch["input_ids"], batch["token_type_ids"], batch["positions"], dtype=self.dtype, key=embeddings_key
        )
        if features == "embeddings":
            return x
        last, hidden = self.encoder(x, batch["sequence_ids"], encoder_key, all_hidden_states=bool(features))
        if hidden is None:
            return last
        chosen = [hidden[layer] for layer in layers_of(features, self.config)]
        return jnp.concatenate(chosen, axis=-1) if self.mix is None else self.mix(jnp.stack(chosen))

    def __call__(self, batch: Mapping[str, jax.Array], key: Key | None = None) -> jax.Array:
        """fp32 outputs [B, outputs], or [B, L, outputs] of tokens, for the arrays that `BertForPreTraining` reads.

        With a key, or with keys [B] of the rows, dropout is on.
        """
        if key is not None and not key.ndim:
            key = row_keys(key, jnp.arange(batch["input_ids"].shape[0]))
        _, _, head_keys, bilstm_keys = split_keys(key, 4)  # the first two are those that `encode` makes of the same
        x = self.encode(batch, key)
        if self.bilstm is not None:
            tokens, sequence = self.bilstm(x, batch["sequence_ids"] > 0, bilstm_keys)
            x = tokens if self.head.is_of_tokens else sequence
        elif self.pooler is not None:
            x = self.pooler(x, batch["cls_positions"])[:, 0]
        elif not self.head.is_of_tokens:
            x = jnp.take_along_axis(x, batch["cls_positions"][:, :, None], axis=1)[:, 0]
        return self.output(dropout(x, self.head.dropout, head_keys))


class Output(nnx.Module):
    """A dense layer to fp32."""

    def __init__(self, size: int, outputs: int, initializer_range: float, *, key: Key):
        self.kernel = parameter(truncated_normal(key, (size, outputs), initializer_range), "embed", None)
        self.bias = parameter(jnp.zeros(outputs, jnp.float32), None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] to fp32 [..., outputs]."""
        kernel = self.kernel[...].astype(x.dtype)
        return jnp.einsum("...d,do->...o", x, kernel, preferred_element_type=jnp.float32) + self.bias[...]
