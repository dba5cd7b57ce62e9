"""BERT with a task output on top, fine-tuned with it (the paper's section 4 and figure 4) or frozen (5.3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.batch import Batch
from bert_jax.model.bert import Embeddings, Pooler
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.bilstm import BiLstm
from bert_jax.model.dropout import dropout, row_keys, split_keys
from bert_jax.model.encoder import Encoder, GatherLayer
from bert_jax.model.layer_features import FEATURES, LayerMix, feature_size, is_mixed, layers_of
from bert_jax.model.layers import Key, bias, parameter, truncated_normal

KINDS = ("classify", "regress", "choose", "span", "tag")


@dataclass(frozen=True)
class TaskHead:
    """Output layers of a task on top of the encoder.

    Attributes:
      kind: `classify` a sequence, `regress` a number from it, `choose` among several sequences, find a `span` in it,
        or `tag` its tokens.
      size: labels of `classify` and `tag`; choices of `choose`; 1 for `regress` and 2 for `span`, its start and end.
      dropout: rate at the input of the output layer.
      bilstm: units per direction of a BiLSTM between the encoder and the output; 0 for none.
      bilstm_layers: layers of that BiLSTM, with `dropout` between them.
      features: the one of `FEATURES` that a frozen encoder returns; "" is the last hidden state of an encoder that is
        fine-tuned.
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
        """Reads the head from a checkpoint's `task`, as written by `about`; dropout is not stored.

        A key that an older checkpoint lacks has its default.
        """
        return cls(**{name: task[name] for name in _IN_CHECKPOINTS if name in task})

    def about(self) -> dict[str, Any]:
        """Returns the fields that rebuild the model, as JSON."""
        return {name: getattr(self, name) for name in _IN_CHECKPOINTS}

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parts of `BertForTask` that are not trained."""
        return ("embeddings", "encoder") if self.features else ()

    @property
    def outputs(self) -> int:
        """Size of the output layer, per sequence or per token."""
        return 1 if self.kind == "choose" else self.size

    @property
    def is_of_tokens(self) -> bool:
        """True if every token has its own outputs."""
        return self.kind in ("span", "tag")


_IN_CHECKPOINTS = ("kind", "size", "bilstm", "bilstm_layers", "features")


class BertForTask(nnx.Module):
    """Encoder with a dense layer on each token or on the pooled sequence.

    A sequence is pooled as in pre-training, from the position in `cls_positions`. With a BiLSTM it is pooled to the two
    final states; with a frozen encoder and no BiLSTM, to the features at that position. A frozen encoder has no
    dropout.
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
        """Initializes fp32 parameters; `dtype` is the type of the computation. For the rest see `Encoder`."""
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

    def encode(
        self, batch: Batch[jax.Array], keys: Key | None = None, *, gather_layer: GatherLayer | None = None
    ) -> jax.Array:
        """Computes the features that the head reads: [B, L, D], or [B, L, 4 D] of four layers, the last one first.

        One key per row [B] turns dropout on. For `gather_layer` see `Encoder`.
        """
        features = self.head.features
        embeddings_key, encoder_key = split_keys(None if features else keys, 2)
        x = self.embeddings(
            batch["input_ids"], batch["token_type_ids"], batch["positions"], dtype=self.dtype, key=embeddings_key
        )
        if features == "embeddings":
            return x
        last, hidden = self.encoder(
            x, batch["sequence_ids"], encoder_key, all_hidden_states=bool(features), gather_layer=gather_layer
        )
        if hidden is None:
            return last
        chosen = [hidden[layer] for layer in layers_of(features, self.config)]
        return jnp.concatenate(chosen, axis=-1) if self.mix is None else self.mix(jnp.stack(chosen))

    def __call__(
        self, batch: Batch[jax.Array], key: Key | None = None, *, gather_layer: GatherLayer | None = None
    ) -> jax.Array:
        """Returns fp32 outputs [B, outputs], or [B, L, outputs] per token, for the inputs of `BertForPreTraining`.

        A key, or one key per row [B], turns dropout on. For `gather_layer` see `Encoder`.
        """
        if key is not None and not key.ndim:
            key = row_keys(key, jnp.arange(batch["input_ids"].shape[0]))
        _, _, head_keys, bilstm_keys = split_keys(key, 4)  # `encode` splits the first two from the same key
        x = self.encode(batch, key, gather_layer=gather_layer)
        if self.bilstm is not None:
            tokens, sequence = self.bilstm(x, batch["sequence_ids"] > 0, bilstm_keys)
            x = tokens if self.head.is_of_tokens else sequence
        elif self.pooler is not None:
            x = self.pooler(x, batch["cls_positions"])[:, 0]
        elif not self.head.is_of_tokens:
            x = jnp.take_along_axis(x, batch["cls_positions"][:, :, None], axis=1)[:, 0]
        return self.output(dropout(x, self.head.dropout, head_keys))


class Output(nnx.Module):
    """Dense output layer in fp32."""

    def __init__(self, size: int, outputs: int, initializer_range: float, *, key: Key):
        self.kernel = parameter(truncated_normal(key, (size, outputs), initializer_range), "embed", None)
        self.bias = bias((outputs,), None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., D] to fp32 [..., outputs]."""
        kernel = self.kernel[...].astype(x.dtype)
        return jnp.einsum("...d,do->...o", x, kernel, preferred_element_type=jnp.float32) + self.bias[...]
