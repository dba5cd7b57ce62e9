"""BERT with a task output on top, fine-tuned with it (the paper's section 4 and figure 4) or frozen (5.3)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.batch import Batch
from bert_jax.model.bert import Bert, GatherLayer, Output, Pooler, Transform
from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import Key, dropout, keys_per_row, parameter, rematerialized, split_keys
from bert_jax.model.workarounds import recurrent_initializer

_LAST_FOUR = (-1, -2, -3, -4)
_LAYERS = {  # -1 is the last, as in the reference
    "embeddings": (),
    "second_to_last": (-2,),
    "last": (-1,),
    "sum_last_four": _LAST_FOUR,
    "concat_last_four": _LAST_FOUR,
    "sum_all": None,
}


def layers_of(features: str, config: BertConfig) -> tuple[int, ...]:
    """Returns the layers whose hidden states are read: from 0, or negative from the last; empty for `embeddings`."""
    layers = _LAYERS[features]
    return tuple(range(config.num_hidden_layers)) if layers is None else layers


def layers_needed(features: str) -> int:
    """Returns the least number of layers that an encoder needs."""
    return -min(_LAYERS[features] or (-1,))


def feature_size(features: str, config: BertConfig) -> int:
    """Returns the feature size of a token."""
    return config.hidden_size * (4 if features == "concat_last_four" else 1)


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
      features: the one of `config_keys.Features` that a frozen encoder returns; "" is the last hidden state of an
        encoder that is fine-tuned.
    """

    kind: str
    size: int
    dropout: float = 0.1
    bilstm: int = 0
    bilstm_layers: int = 1
    features: str = ""

    @classmethod
    def from_dict(cls, task: Mapping[str, Any]) -> "TaskHead":
        """Reads the head from a checkpoint's `task`, as written by `to_dict`; dropout is not stored.

        A key that an older checkpoint lacks has its default.
        """
        return cls(**{name: task[name] for name in _IN_CHECKPOINTS if name in task})

    def to_dict(self) -> dict[str, Any]:
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
    def per_token(self) -> bool:
        """True if every token has its own outputs."""
        return self.kind in ("span", "tag")


_IN_CHECKPOINTS = ("kind", "size", "bilstm", "bilstm_layers", "features")


class BertForTask(Bert):
    """Encoder with a dense layer on each token or on the pooled sequence.

    A sequence is pooled as in pre-training, from the position in `cls_positions`, or from the mean of its tokens if
    `classifier_pooling` says so. A model without a pooler has the masked-LM head's layers on each token or the pooled
    sequence. With a BiLSTM a sequence is pooled to the two final states; with a frozen encoder and no BiLSTM, to the
    features at that position. A frozen encoder has no dropout.
    """

    def __init__(self, config: BertConfig, *, key: Key, head: TaskHead, **settings: Any):
        """Initializes fp32 parameters; for `settings` see `Bert`."""
        super().__init__(config, key=key, **settings)
        _, _, pooler, bilstm, output = jax.random.split(key, 5)
        sums = head.features.startswith("sum")
        self.mix = LayerMix(len(layers_of(head.features, config))) if sums else None
        fine_tunes = not head.bilstm and not head.features
        pools = config.pooler and fine_tunes and not head.per_token
        self.pooler = Pooler(config, key=pooler) if pools else None
        self.transform = Transform(config, key=pooler) if fine_tunes and not config.pooler else None
        size = feature_size(head.features, config)
        self.bilstm = (
            BiLstm(size, head.bilstm, key=bilstm, layers=head.bilstm_layers, dropout=head.dropout)
            if head.bilstm else None
        )  # fmt: skip
        std = size**-0.5 if config.depth_scaled_init else config.initializer_range
        self.output = Output(2 * head.bilstm or size, head.outputs, std, key=output)
        self.head = head

    def features(
        self, batch: Batch[jax.Array], key: Key | None = None, *, gather_layer: GatherLayer | None = None
    ) -> jax.Array:
        """Computes the features that the head reads: [B, L, D], or [B, L, 4 D] of four layers, the last one first.

        Takes the arguments of `Bert.encode`.
        """
        features = self.head.features
        if features == "embeddings":
            return self.embeddings(batch, None, dtype=self.dtype)
        last, hidden = self.encode(
            batch, None if features else key, all_hidden_states=bool(features), gather_layer=gather_layer
        )
        if hidden is None:
            return last
        chosen = [hidden[1:][layer] for layer in layers_of(features, self.config)]
        return jnp.concatenate(chosen, axis=-1) if self.mix is None else self.mix(jnp.stack(chosen))

    def __call__(
        self, batch: Batch[jax.Array], key: Key | None = None, *, gather_layer: GatherLayer | None = None
    ) -> jax.Array:
        """Returns fp32 outputs [B, outputs], or [B, L, outputs] per token, for the inputs of `BertForPreTraining`.

        Takes the arguments of `Bert.encode`.
        """
        keys = keys_per_row(key, batch["input_ids"].shape[0])
        _, _, head_keys, bilstm_keys = split_keys(keys, 4)  # `encode` splits the first two from the same keys
        x = self.features(batch, keys, gather_layer=gather_layer)
        if self.bilstm is not None:
            tokens, sequence = self.bilstm(x, batch["sequence_ids"] > 0, bilstm_keys)
            x = tokens if self.head.per_token else sequence
        elif not self.head.per_token:
            positions = batch["cls_positions"]
            if self.config.classifier_pooling == "mean":
                x, positions = mean_of_tokens(x, batch["sequence_ids"])[:, None], jnp.zeros_like(positions)
            pool = self.pooler or (lambda x, at: jnp.take_along_axis(x, at[:, :, None], axis=1))
            x = pool(x, positions)[:, 0]
        if self.transform is not None:
            x = self.transform.transform(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        return self.output(dropout(x, self.head.dropout, head_keys))


def mean_of_tokens(x: jax.Array, sequence_ids: jax.Array) -> jax.Array:
    """Averages x [B, L, D] over the tokens of a row that are not padding, in fp32, to [B, D] in the type of x."""
    is_real = (sequence_ids > 0).astype(jnp.float32)
    mean = jnp.einsum("bld,bl->bd", x, is_real, preferred_element_type=jnp.float32) / is_real.sum(axis=1)[:, None]
    return mean.astype(x.dtype)


class LayerMix(nnx.Module):
    """Mix scale * sum_k softmax(weights)_k h_k (Peters et al. 2018, arXiv:1802.05365, equation 1); starts as mean."""

    def __init__(self, layers: int):
        self.weights = parameter(jnp.zeros(layers, jnp.float32), None, weight_decay=False)
        self.scale = parameter(jnp.ones((), jnp.float32), weight_decay=False)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Maps [layers, B, L, D] to [B, L, D] in the type of `hidden`; sums in fp32."""
        shares = self.scale[...] * jax.nn.softmax(self.weights[...])
        return (shares[:, None, None, None] * hidden).sum(axis=0).astype(hidden.dtype)


_GATES = 4  # input, forget, cell, output
_FORGET = 1

_initial_input_kernel = jax.nn.initializers.glorot_uniform()


class Lstm(nnx.Module):
    """One direction of one layer. The bias of the forget gate starts at 1, so that cells keep their state at first."""

    def __init__(self, inputs: int, units: int, *, key: Key):
        input_key, state_key = jax.random.split(key)

        def gates(initial: jax.nn.initializers.Initializer, key: Key, inputs: int) -> jax.Array:
            """Draws a kernel for each gate: [inputs, 4, units]."""
            return jax.vmap(lambda key: initial(key, (inputs, units)), out_axes=1)(jax.random.split(key, _GATES))

        self.input_kernel = parameter(gates(_initial_input_kernel, input_key, inputs), "embed", None, None)
        self.state_kernel = parameter(gates(recurrent_initializer, state_key, units), None, None, None)
        ones_to_forget = jnp.zeros((_GATES, units), jnp.float32).at[_FORGET].set(1.0)
        self.bias = parameter(ones_to_forget, None, None, weight_decay=False)

    def input_gates(self, x: jax.Array) -> jax.Array:
        """Computes the contribution of x [B, L, D] to the gates: [L, B, 4, H]."""
        kernel, bias = self.input_kernel[...].astype(x.dtype), self.bias[...].astype(x.dtype)
        return jnp.einsum("bld,dgh->lbgh", x, kernel) + bias


def _both_directions(forward: Lstm, backward: Lstm, x: jax.Array, is_real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maps x [B, L, D] and is_real bool [B, L] to states [B, L, 2H] and final states [B, 2H].

    Cells are fp32, states have the type of x. Padding leaves a state unchanged: the final state is that of the last
    real position, in the backward direction of the first. Both directions share one scan, because launch latency
    dominates a step on accelerators.
    """

    def stack_directions(forward: jax.Array, backward: jax.Array) -> jax.Array:
        """Stacks [L, ...] of both directions to [L, 2, ...], the second one reversed along L; it is its own inverse."""
        return jnp.stack([forward, jnp.flip(backward, axis=0)], axis=1)

    from_input = stack_directions(forward.input_gates(x), backward.input_gates(x))
    is_real = stack_directions(is_real.T, is_real.T)[..., None]
    state_kernel = jnp.stack([forward.state_kernel[...], backward.state_kernel[...]]).astype(x.dtype)

    @rematerialized
    def advance(cell: jax.Array, from_input: jax.Array, from_state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the next cell and state in fp32: a cell may be a sum over hundreds of positions."""
        gates = from_input.astype(jnp.float32) + from_state
        cell = jax.nn.sigmoid(gates[:, :, 1]) * cell + jax.nn.sigmoid(gates[:, :, 0]) * jnp.tanh(gates[:, :, 2])
        return cell, jax.nn.sigmoid(gates[:, :, 3]) * jnp.tanh(cell)

    def step(carry: tuple[jax.Array, jax.Array], now: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
        cell, state = carry
        gates_from_input, real = now
        from_state = jnp.einsum("dbh,dhgk->dbgk", state, state_kernel, preferred_element_type=jnp.float32)
        new_cell, new_state = advance(cell, gates_from_input, from_state)
        carry = jnp.where(real, new_cell, cell), jnp.where(real, new_state.astype(state.dtype), state)
        return carry, carry[1]

    zeros = jnp.zeros_like(from_input[0, :, :, 0])  # zeros_like: device-varying under shard_map, as rows are
    states: jax.Array
    (_, final), states = jax.lax.scan(step, (zeros.astype(jnp.float32), zeros), (from_input, is_real))
    states = stack_directions(states[:, 0], states[:, 1])  # [L, 2, B, H], each at its position
    rows, length, _ = x.shape
    return states.transpose(2, 0, 1, 3).reshape(rows, length, -1), final.swapaxes(0, 1).reshape(rows, -1)


class BiLstm(nnx.Module):
    """Stacked bidirectional layers. Each layer reads both directions of the layer below, as in torch's `nn.LSTM`."""

    def __init__(self, inputs: int, units: int, *, key: Key, layers: int = 1, dropout: float = 0.0):
        """Initializes `layers` layers of `units` per direction, with `dropout` between layers."""
        forward, backward, above = jax.random.split(key, 3)
        self.forward = Lstm(inputs, units, key=forward)
        self.backward = Lstm(inputs, units, key=backward)
        more = layers > 1
        self.above = BiLstm(2 * units, units, key=above, layers=layers - 1, dropout=dropout) if more else None
        self.dropout_rate = dropout

    def __call__(self, x: jax.Array, is_real: jax.Array, keys: Key | None = None) -> tuple[jax.Array, jax.Array]:
        """Maps x [B, L, D] and is_real bool [B, L] to the last layer's states [B, L, 2H] and final states [B, 2H].

        One key per row [B] turns dropout on.
        """
        states, final = _both_directions(self.forward, self.backward, x, is_real)
        if self.above is None:
            return states, final
        here, above = split_keys(keys, 2)
        return self.above(dropout(states, self.dropout_rate, here), is_real, above)


def model_settings(heads: Collection[str], task: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the settings for `abstract_parameters` of a model with these heads, or fine-tuned for a `task`."""
    return {"heads": heads} if task is None else {"build": BertForTask, "head": TaskHead.from_dict(task)}
