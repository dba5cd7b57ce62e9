"""BERT pre-training in JAX and Flax, from raw text to a checkpoint that fine-tunes.

    bert = bert_jax.load("runs/base")              a workdir, one of its checkpoints/STEP, or an imported checkpoint
    bert.encode(texts), bert.embed(texts), bert.fill_mask("Paris is the [MASK] of France.")
    bert_jax.load("runs/mine").predict(texts)      a fine-tuned model

    config = bert_jax.load_config("bert_tiny", {"data.path": "data"})
    bert_jax.pretrain(config, "runs/tiny")         the whole run; `finetune` is its counterpart
    bert_jax.Training(config)                      its parts, for a training loop of one's own

`__all__` is the public interface. Everything else may change in any version.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bert_jax.supported_versions import check_installed
from bert_jax.version import __version__ as __version__

if TYPE_CHECKING:
    from bert_jax.config import FinetuneConfig, PretrainConfig, load_config
    from bert_jax.custom_training import Training
    from bert_jax.data.dataset import PreparedDataset
    from bert_jax.errors import BertJaxError, InputError
    from bert_jax.finetuning.finetune import finetune
    from bert_jax.inference.pretrained import Filling, FineTuned, PreTrained, load
    from bert_jax.inference.text_encoder import Encoded
    from bert_jax.training.pretrain import pretrain

_MODULES = {
    "BertJaxError": "errors",
    "Encoded": "inference.text_encoder",
    "Filling": "inference.pretrained",
    "FineTuned": "inference.pretrained",
    "FinetuneConfig": "config",
    "InputError": "errors",
    "PreTrained": "inference.pretrained",
    "PretrainConfig": "config",
    "PreparedDataset": "data.dataset",
    "Training": "custom_training",
    "finetune": "finetuning.finetune",
    "load": "inference.pretrained",
    "load_config": "config",
    "pretrain": "training.pretrain",
}
__all__ = [
    "BertJaxError",
    "Encoded",
    "Filling",
    "FineTuned",
    "FinetuneConfig",
    "InputError",
    "PreTrained",
    "PreparedDataset",
    "PretrainConfig",
    "Training",
    "__version__",
    "finetune",
    "load",
    "load_config",
    "pretrain",
]

check_installed()


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: `import bert_jax` does not wait for JAX."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"bert_jax.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, imported or not."""
    return sorted({*globals(), *__all__})
