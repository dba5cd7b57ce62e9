"""BERT pre-training in JAX and Flax, from raw text to a checkpoint that fine-tunes.

`bert_jax.load(CHECKPOINT)` is a model with its tokenizer and its config; of a fine-tuned one also with its labels.
"""

from typing import TYPE_CHECKING, Any

from bert_jax.supported_versions import check_installed

if TYPE_CHECKING:
    from bert_jax.inference.pretrained import FineTuned, PreTrained, load

__version__ = "0.1.0"
__all__ = ["FineTuned", "PreTrained", "load"]

check_installed()


def __getattr__(name: str) -> Any:
    """`FineTuned`, `PreTrained` and `load` when they are first asked for: `import bert_jax` does not wait for JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bert_jax.inference import pretrained

    return getattr(pretrained, name)
