"""BERT pre-training in JAX and Flax, from raw text to a checkpoint that fine-tunes."""

__version__ = "0.1.0"
