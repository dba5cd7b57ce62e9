"""What the feature-based approach takes of a frozen encoder's layers (Devlin et al. 2019, section 5.3 and table 7).

Hidden states are what LayerNorms give: a layer's second, and that of the embeddings, which are the three summed.
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
    """The layers whose hidden states are read, from 0 or, where negative, from the last; none of `embeddings`."""
    layers = _LAYERS[features]
    return tuple(range(config.num_hidden_layers)) if layers is None else layers


def layers_needed(features: str) -> int:
    """The fewest layers that an encoder has to have."""
    return -min(_LAYERS[features] or (-1,))


def is_mixed(features: str) -> bool:
    """Whether several hidden states are summed, with weights that are learned."""
    return features.startswith("sum")


def feature_size(features: str, config: BertConfig) -> int:
    """Numbers of a token's features."""
    return config.hidden_size * (4 if features == "concat_last_four" else 1)


class LayerMix(nnx.Module):
    """scale * sum_k softmax(weights)_k h_k (Peters et al. 2018, arXiv:1802.05365, equation 1), at first their mean."""

    def __init__(self, layers: int):
        self.weights = parameter(jnp.zeros(layers, jnp.float32), None)
        self.scale = parameter(jnp.ones((), jnp.float32))

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """[layers, B, L, D] to [B, L, D], in the type of `hidden`; added up in fp32."""
        shares = self.scale[...] * jax.nn.softmax(self.weights[...])
        return (shares[:, None, None, None] * hidden).sum(axis=0).astype(hidden.dtype)
