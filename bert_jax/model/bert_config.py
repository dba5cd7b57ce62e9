"""The sizes of a BERT, by the names of `bert_config.json`."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from bert_jax.config_keys import NotNegativeNumber, Positive, PositiveNumber, ShareBelow1
from bert_jax.errors import InputError
from bert_jax.sections import Section, from_mapping

VOCABULARY_MULTIPLE = 128
"""The word embeddings are padded to this many rows, for sharding and for matrix units."""


class BertConfig(Section):
    """Sizes of a BERT. The defaults are BERT-BASE, uncased (Devlin et al. 2019).

    `hidden_act` "gelu" is the exact form with erf, as in Hugging Face's models; "gelu_new" (or
    "gelu_pytorch_tanh") is the tanh form of Google's code. `is_decoder` makes a left-to-right model: no position sees
    those to its right. Raises InputError with the name of a field that is invalid.
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
    type_vocab_size: Positive = 2
    initializer_range: NotNegativeNumber = 0.02
    layer_norm_eps: PositiveNumber = 1e-12
    is_decoder: bool = False

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

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embeddings: `vocab_size` rounded up. The rows beyond are zero and never predicted."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields by name."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Returns the text of `bert_config.json`."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BertConfig":
        """Makes a config from a mapping of field names. Raises InputError with the name of an unknown key."""
        return from_mapping(cls, values)
