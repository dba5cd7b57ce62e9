"""A bidirectional LSTM (Hochreiter and Schmidhuber 1997; Graves and Schmidhuber 2005) over padded rows."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.model.dropout import dropout, split_keys
from bert_jax.model.layers import Key, parameter, rematerialized
from bert_jax.model.workarounds import recurrent_initializer

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
