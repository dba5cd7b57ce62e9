"""Sizes of the GPU benchmark: those that fill a GPU, and tiny ones for a rehearsal on a CPU."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scale:
    """Models and batches of all parts.

    Attributes:
      large: config of the parts that measure speed.
      small: config of parity and determinism.
      small_rows: rows of 128 tokens in these.
      repeated_steps: steps of each run that determinism compares.
      batches: rows to try, by sequence length, descending: the largest that fits is measured.
      rows: fixed rows, by sequence length, for comparisons of variants.
      lengths: sequence lengths of these comparisons, the more telling one first.
      rounds: rounds per measurement, of which the median is taken.
      round_seconds: duration of a round.
      curve: overrides of `bert_base` for the pre-training curve.
      curve_rows: rows of a microbatch to try, descending.
      least_curve_seconds: time below which no curve starts.
      vocab_size: pieces of the vocabulary, if the curve makes its own data.
      text: inputs of `bert-jax prepare`, likewise.
    """

    large: str = "bert_large"
    small: str = "bert:L4_H512"
    small_rows: int = 32
    repeated_steps: int = 20
    batches: dict[int, tuple[int, ...]] = field(
        default_factory=lambda: {
            128: (2048, 1536, 1024, 768, 512, 384, 256, 128, 64, 32, 16),
            512: (512, 384, 256, 192, 128, 96, 64, 32, 16, 8, 4),
        }
    )
    rows: dict[int, int] = field(default_factory=lambda: {128: 128, 512: 32})
    lengths: tuple[int, ...] = (512, 128)
    rounds: int = 6
    round_seconds: float = 1.0
    curve: dict[str, Any] = field(
        default_factory=lambda: {
            "total_steps": 4000, "global_batch_size": 1024, "optimizer.learning_rate": 5e-4,
            "optimizer.bias_correction": True, "log_every_steps": 20, "eval_batches": 4,
        }
    )  # fmt: skip
    curve_rows: tuple[int, ...] = (512, 256, 128, 64, 32)
    least_curve_seconds: float = 120.0
    vocab_size: int = 30_522
    text: tuple[str, ...] = ("python", "numpy", "scipy", "matplotlib")  # of launch/python_docs.py


FULL = Scale()
REHEARSAL = Scale(
    large="bert:L1_H64", small="bert:L1_H64", small_rows=4, repeated_steps=2, batches={128: (8, 4), 512: (2,)},
    rows={128: 4}, lengths=(128,), rounds=2, round_seconds=0.05, curve_rows=(8,), least_curve_seconds=1.0,
    curve={
        "total_steps": 24, "global_batch_size": 16, "optimizer.learning_rate": 5e-4, "optimizer.bias_correction": True,
        "log_every_steps": 4, "eval_batches": 1, "model.num_hidden_layers": 1, "model.hidden_size": 64,
        "model.num_attention_heads": 1, "model.intermediate_size": 128,
    },
    vocab_size=512, text=("json", "email"),
)  # fmt: skip
