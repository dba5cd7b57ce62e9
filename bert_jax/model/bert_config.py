"""The sizes of a BERT, by the names of `bert_config.json`."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCABULARY_MULTIPLE = 128
"""The word embeddings are padded to this many rows, for sharding and for matrix units."""

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

_KINDS = {int: "an int", float: "a finite number", bool: "true or false", str: "a string"}


def _is_of_kind(kind: type, value: Any) -> bool:
    """Checks the type of a field: a bool does not count as an int, and an int counts as a float."""
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT. The defaults are BERT-BASE, uncased (Devlin et al. 2019).

    `hidden_act` "gelu" is the exact form with erf, as in Hugging Face's models; "gelu_new" (or
    "gelu_pytorch_tanh") is the tanh form of Google's code. `is_decoder` makes a left-to-right model: no position sees
    those to its right. Raises ValueError with the name of a field that has another type than its default or is invalid.
    """

    vocab_size: int = 30_522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    is_decoder: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            kind, value = type(field.default), getattr(self, field.name)
            if not _is_of_kind(kind, value):
                raise ValueError(f"{field.name}={value!r:.60}: must be {_KINDS[kind]}")
            if kind is float:  # JAX takes no int of more than 64 bits
                object.__setattr__(self, field.name, float(value))
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
            "max_position_embeddings", "type_vocab_size",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act={self.hidden_act!r}: must be one of {', '.join(ACTIVATIONS)}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be a probability below 1")
        if self.layer_norm_eps <= 0:
            raise ValueError(f"layer_norm_eps={self.layer_norm_eps}: must be above 0")
        if self.initializer_range < 0:
            raise ValueError(f"initializer_range={self.initializer_range}: must be at least 0")

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
        """Makes a config from a mapping of field names. Raises TypeError with the name of an unknown key."""
        return cls(**values)
