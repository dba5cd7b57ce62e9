"""A bidirectional LSTM (Hochreiter and Schmidhuber 1997; Graves and Schmidhuber 2005) over padded rows."""

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.model.layers import Key, dropout, parameter, recomputed, split_keys

_GATES = 4  # input, forget, cell, output
_FORGET = 1

_initial_input_kernel = jax.nn.initializers.glorot_uniform()
# Up to 1 / sqrt(units), as in torch. Not orthogonal: two QR decompositions at once may wait for each other forever in
# jaxlib 0.10 on CPU hosts with few cores.
_initial_state_kernel = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class Lstm(nnx.Module):
    """One direction of one layer. The forget gate's bias starts at 1, so that it remembers at first."""

    def __init__(self, inputs: int, units: int, *, key: Key):
        of_input, of_state = jax.random.split(key)

        def gates(initial: jax.nn.initializers.Initializer, key: Key, inputs: int) -> jax.Array:
            """[inputs, 4, units], each gate's a kernel of its own."""
            return jax.vmap(lambda key: initial(key, (inputs, units)), out_axes=1)(jax.random.split(key, _GATES))

        self.input_kernel = parameter(gates(_initial_input_kernel, of_input, inputs), "embed", None, None)
        self.state_kernel = parameter(gates(_initial_state_kernel, of_state, units), None, None, None)
        self.bias = parameter(jnp.zeros((_GATES, units), jnp.float32).at[_FORGET].set(1.0), None, None)

    def of_input(self, x: jax.Array) -> jax.Array:
        """What x [B, L, D] adds to the gates: [L, B, 4, H]."""
        kernel, bias = self.input_kernel[...].astype(x.dtype), self.bias[...].astype(x.dtype)
        return jnp.einsum("bld,dgh->lbgh", x, kernel) + bias


def _both_directions(forward: Lstm, backward: Lstm, x: jax.Array, is_real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [B, L, D] and is_real bool [B, L] to states [B, L, 2H] and the final ones [B, 2H].

    Cells are fp32, states in the type of x. Padding leaves a state as it is: the final one is that of the last real
    position, backward of the first. One loop goes both ways at once: on accelerators a step's time is that of starting
    it, and two loops have twice as many.
    """

    def there_and_back(of_forward: jax.Array, of_backward: jax.Array) -> jax.Array:
        """[L, ...] of each direction in the order in which it meets positions: [L, 2, ...]; its own inverse."""
        return jnp.stack([of_forward, jnp.flip(of_backward, axis=0)], axis=1)

    from_input = there_and_back(forward.of_input(x), backward.of_input(x))
    is_real = there_and_back(is_real.T, is_real.T)[..., None]
    state_kernel = jnp.stack([forward.state_kernel[...], backward.state_kernel[...]]).astype(x.dtype)

    @recomputed
    def advance(cell: jax.Array, from_input: jax.Array, from_state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The next cell and state, in fp32: a cell that remembers hundreds of positions is a sum of as many."""
        gates = from_input.astype(jnp.float32) + from_state
        cell = jax.nn.sigmoid(gates[:, :, 1]) * cell + jax.nn.sigmoid(gates[:, :, 0]) * jnp.tanh(gates[:, :, 2])
        return cell, jax.nn.sigmoid(gates[:, :, 3]) * jnp.tanh(cell)

    def step(carry: tuple[jax.Array, jax.Array], now: tuple[jax.Array, jax.Array]) -> tuple:
        cell, state = carry
        gates_from_input, real = now
        from_state = jnp.einsum("dbh,dhgk->dbgk", state, state_kernel, preferred_element_type=jnp.float32)
        new_cell, new_state = advance(cell, gates_from_input, from_state)
        carry = jnp.where(real, new_cell, cell), jnp.where(real, new_state.astype(state.dtype), state)
        return carry, carry[1]

    zeros = jnp.zeros_like(from_input[0, :, :, 0])  # like, so that it varies over devices as rows do
    states: jax.Array
    (_, final), states = jax.lax.scan(step, (zeros.astype(jnp.float32), zeros), (from_input, is_real))
    states = there_and_back(states[:, 0], states[:, 1])  # [L, 2, B, H], each at its position
    rows, length, _ = x.shape
    return states.transpose(2, 0, 1, 3).reshape(rows, length, -1), final.swapaxes(0, 1).reshape(rows, -1)


class BiLstm(nnx.Module):
    """Layers of both directions, each on what both directions of the one below it give, as in torch's `nn.LSTM`."""

    def __init__(self, inputs: int, units: int, *, key: Key, layers: int = 1, dropout: float = 0.0):
        """`units` are those of a direction; `dropout` is of what a layer gives to the next."""
        forward, backward, above = jax.random.split(key, 3)
        self.forward = Lstm(inputs, units, key=forward)
        self.backward = Lstm(inputs, units, key=backward)
        more = layers > 1
        self.above = BiLstm(2 * units, units, key=above, layers=layers - 1, dropout=dropout) if more else None
        self.dropout_rate = dropout

    def __call__(self, x: jax.Array, is_real: jax.Array, keys: Key | None = None) -> tuple[jax.Array, jax.Array]:
        """x [B, L, D], bool [B, L] to the last layer's states [B, L, 2H] and both directions' final ones [B, 2H].

        With keys [B] of the rows, dropout is on.
        """
        states, final = _both_directions(self.forward, self.backward, x, is_real)
        if self.above is None:
            return states, final
        here, above = split_keys(keys, 2)
        return self.above(dropout(states, self.dropout_rate, here), is_real, above)
