"""The sizes of a BERT, by the names of `bert_config.json`, and the switches that make it a ModernBERT."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from bert_jax.config_keys import NotNegative, NotNegativeNumber, Positive, PositiveNumber, ShareBelow1
from bert_jax.errors import InputError
from bert_jax.sections import Section, from_mapping

VOCABULARY_MULTIPLE = 128
"""The word embeddings are padded to this many rows, for sharding and for matrix units."""


class BertConfig(Section):
    """Sizes and switches of a model. The defaults are BERT-BASE, uncased (Devlin et al. 2019).

    `hidden_act` "gelu" is the exact form with erf, as in Hugging Face's models; "gelu_new" (or
    "gelu_pytorch_tanh") is the tanh form of Google's code. `is_decoder` makes a left-to-right model: no position sees
    those to its right.

    The fields from `embedding_dropout` on are steps from BERT to ModernBERT (Warner et al. 2024, arXiv:2412.13663), by
    the names of ModernBertConfig in `transformers` where it has them. Raises InputError with the name of a field that
    is invalid.
    """

    vocab_size: Positive = 30_522
    hidden_size: Positive = 768
    num_hidden_layers: Positive = 12
    num_attention_heads: Positive = 12
    intermediate_size: Positive = 3072
    hidden_act: Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"] = "gelu"
    hidden_dropout_prob: ShareBelow1 = 0.1
    attention_probs_dropout_prob: ShareBelow1 = 0.1
    max_position_embeddings: Positive = 512
    type_vocab_size: NotNegative = 2  # 0: no segment embeddings
    initializer_range: NotNegativeNumber = 0.02
    layer_norm_eps: PositiveNumber = 1e-12
    is_decoder: bool = False
    embedding_dropout: ShareBelow1 | None = None  # None: hidden_dropout_prob
    attention_output_dropout: ShareBelow1 | None = None  # None: hidden_dropout_prob
    mlp_dropout: ShareBelow1 = 0.0  # of the input of a feed-forward block's second product
    position_embedding_type: Literal["absolute", "rotary"] = "absolute"  # absolute: learned
    global_rope_theta: PositiveNumber = 160_000.0
    local_rope_theta: PositiveNumber = 10_000.0
    global_attn_every_n_layers: Positive = 1  # other layers are local; layer 0 is global
    local_attention: Positive = 128  # a local layer's positions see this // 2 positions to each side
    pre_norm: bool = False  # LayerNorm before a sublayer, in its residual branch
    gated_mlp: bool = False  # act(x W) * (x V) instead of act(x W) (Shazeer 2020, arXiv:2002.05202)
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    classifier_bias: bool = True  # of the dense layer of the masked-LM head, and of tasks without a pooler
    decoder_bias: bool = True
    pooler: bool = True  # False: no pooler, no next-sentence head; tasks have the masked-LM head's layers
    classifier_pooling: Literal["cls", "mean"] = "cls"
    depth_scaled_init: bool = False  # weights that end a sublayer start smaller by sqrt(2 * num_hidden_layers)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}"
            )

    @property
    def head_size(self) -> int:
        """Features of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def dropout_rate(self, rate: float | None) -> float:
        """Returns the rate of a field that is None for `hidden_dropout_prob`."""
        return self.hidden_dropout_prob if rate is None else rate

    @property
    def output_range(self) -> float:
        """Standard deviation of new weights that end a sublayer or head."""
        return self.initializer_range / (math.sqrt(2 * self.num_hidden_layers) if self.depth_scaled_init else 1)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embeddings: `vocab_size` rounded up. The rows beyond are zero and never predicted."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BertConfig":
        """Makes a config from a mapping of field names. Raises InputError with the name of an unknown key."""
        return from_mapping(cls, values)
