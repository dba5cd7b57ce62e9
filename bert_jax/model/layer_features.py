"""Features of a frozen encoder's layers (feature-based approach: Devlin et al. 2019, section 5.3 and table 7).

Hidden states are outputs of LayerNorms: the second one of each layer, and the one of the summed embeddings.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import parameter

_LAST_FOUR = (-1, -2, -3, -4)
_LAYERS = {  # -1 is the last, as in the reference
    "embeddings": (),
    "second_to_last": (-2,),
    "last": (-1,),
    "sum_last_four": _LAST_FOUR,
    "concat_last_four": _LAST_FOUR,
    "sum_all": None,
}

FEATURES = tuple(_LAYERS)
"""The six ways of table 7, in its order: one hidden state, the weighted sum of several, or several side by side."""


def layers_of(features: str, config: BertConfig) -> tuple[int, ...]:
    """Returns the layers whose hidden states are read: from 0, or negative from the last; empty for `embeddings`."""
    layers = _LAYERS[features]
    return tuple(range(config.num_hidden_layers)) if layers is None else layers


def layers_needed(features: str) -> int:
    """Returns the least number of layers that an encoder needs."""
    return -min(_LAYERS[features] or (-1,))


def is_mixed(features: str) -> bool:
    """Returns whether several hidden states are summed with learned weights."""
    return features.startswith("sum")


def feature_size(features: str, config: BertConfig) -> int:
    """Returns the feature size of a token."""
    return config.hidden_size * (4 if features == "concat_last_four" else 1)


class LayerMix(nnx.Module):
    """Mix scale * sum_k softmax(weights)_k h_k (Peters et al. 2018, arXiv:1802.05365, equation 1); starts as mean."""

    def __init__(self, layers: int):
        self.weights = parameter(jnp.zeros(layers, jnp.float32), None, weight_decay=False)
        self.scale = parameter(jnp.ones((), jnp.float32), weight_decay=False)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Maps [layers, B, L, D] to [B, L, D] in the type of `hidden`; sums in fp32."""
        shares = self.scale[...] * jax.nn.softmax(self.weights[...])
        return (shares[:, None, None, None] * hidden).sum(axis=0).astype(hidden.dtype)
