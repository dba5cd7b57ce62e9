"""The two pre-training heads and the pooler (the paper's section 3.1)."""

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.model.bert_config import BertConfig
from bert_jax.model.layers import Key, LayerNorm, activation, parameter, truncated_normal


class Pooler(nnx.Module):
    """Pooler: tanh(dense([CLS]))."""

    def __init__(self, config: BertConfig, *, key: Key):
        size = config.hidden_size
        self.kernel = parameter(truncated_normal(key, (size, size), config.initializer_range), "embed", "pooled")
        self.bias = parameter(jnp.zeros(size, jnp.float32), "pooled")

    def __call__(self, x: jax.Array, cls_positions: jax.Array) -> jax.Array:
        """Maps x [B, L, D] at cls_positions [B, K] to [B, K, D]."""
        cls = jnp.take_along_axis(x, cls_positions[:, :, None], axis=1)
        return jnp.tanh(
            jnp.einsum("bkd,de->bke", cls, self.kernel[...].astype(x.dtype)) + self.bias[...].astype(x.dtype)
        )


class MaskedLanguageModelHead(nnx.Module):
    """Masked-LM head at masked positions: dense(D), activation, LayerNorm, transposed word embeddings, bias."""

    def __init__(self, config: BertConfig, *, key: Key):
        size = config.hidden_size
        self.kernel = parameter(truncated_normal(key, (size, size), config.initializer_range), "embed", "pooled")
        self.bias = parameter(jnp.zeros(size, jnp.float32), "pooled")
        self.norm = LayerNorm(size, config.layer_norm_eps)
        self.output_bias = parameter(jnp.zeros(config.padded_vocab_size, jnp.float32), "vocab")
        self.hidden_act = config.hidden_act
        self.vocab_size = config.vocab_size

    def __call__(self, x: jax.Array, masked_positions: jax.Array, word_embeddings: jax.Array) -> jax.Array:
        """Maps x [B, L, D] at masked_positions [B, P] to fp32 logits [B, P, V]; those of padding are -inf."""
        dtype = x.dtype
        x = jnp.take_along_axis(x, masked_positions[:, :, None], axis=1)
        x = x.reshape(-1, x.shape[-1])  # all predictions on one axis, for the reason given in `project`
        x = jnp.einsum("nd,de->ne", x, self.kernel[...].astype(dtype)) + self.bias[...].astype(dtype)
        x = self.norm(activation(self.hidden_act, x))
        logits = jnp.einsum("nd,vd->nv", x, word_embeddings.astype(dtype), preferred_element_type=jnp.float32)
        is_word = jnp.arange(logits.shape[-1]) < self.vocab_size
        logits = jnp.where(is_word, logits + self.output_bias[...], -jnp.inf)
        return logits.reshape(*masked_positions.shape, -1)


class NextSentenceHead(nnx.Module):
    """Next-sentence head: dense(2) on the pooled vector; class 0 is the next sentence, 1 a random one."""

    def __init__(self, config: BertConfig, *, key: Key):
        self.kernel = parameter(truncated_normal(key, (config.hidden_size, 2), config.initializer_range), "embed", None)
        self.bias = parameter(jnp.zeros(2, jnp.float32), None)

    def __call__(self, pooled: jax.Array) -> jax.Array:
        """Maps [B, K, D] to fp32 logits [B, K, 2]."""
        kernel = self.kernel[...].astype(pooled.dtype)
        return jnp.einsum("bkd,dc->bkc", pooled, kernel, preferred_element_type=jnp.float32) + self.bias[...]
