"""BERT pre-training in JAX and Flax, from raw text to a checkpoint that fine-tunes.

`bert_jax.load(CHECKPOINT)` returns a model with its tokenizer and config; a fine-tuned model also has its labels.
"""

from typing import TYPE_CHECKING, Any

from bert_jax.supported_versions import check_installed

if TYPE_CHECKING:
    from bert_jax.inference.pretrained import FineTuned, PreTrained, load

__version__ = "0.1.0"
__all__ = ["FineTuned", "PreTrained", "load"]

check_installed()


def __getattr__(name: str) -> Any:
    """Imports `FineTuned`, `PreTrained` and `load` on first use: `import bert_jax` does not wait for JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bert_jax.inference import pretrained

    return getattr(pretrained, name)
