"""BERT pre-training in JAX and Flax, from raw text to a checkpoint that fine-tunes.

    bert = bert_jax.load("runs/base")              a workdir, one of its checkpoints/STEP, or an imported checkpoint
    bert.encode(texts), bert.embed(texts), bert.fill_mask("Paris is the [MASK] of France.")
    bert.score(texts)                              pseudo-log-likelihoods
    bert_jax.load("runs/mine").predict(texts)      a fine-tuned model

    config = bert_jax.load_config("bert_tiny", {"data.path": "data"})
    bert_jax.pretrain(config, "runs/tiny")         the whole run; `finetune` is its counterpart
    bert_jax.Training(config)                      its parts, for a training loop of one's own

    bert_jax.evaluate("runs/base", "data")         a function per command, with its options, checks and defaults

`__all__` is the public interface. Everything else may change in any version.
"""

from etils import epy

from bert_jax.version import __version__ as __version__

with epy.lazy_api_imports(globals()):  # `import bert_jax` does not wait for JAX
    from bert_jax.ahead_of_time.dry_run import plan_run
    from bert_jax.commands import Result
    from bert_jax.commands.data import inspect, prepare, vocab
    from bert_jax.commands.models import evaluate, export, features, fill_mask, import_, predict, score
    from bert_jax.commands.runs import check, compile, report, study
    from bert_jax.config import FinetuneConfig, PretrainConfig, StudyConfig, load_config
    from bert_jax.data.dataset import PreparedDataset
    from bert_jax.data.options import CorpusOptions, PrepareOptions
    from bert_jax.errors import BertJaxError, InputError
    from bert_jax.finetuning.finetune import finetune
    from bert_jax.inference.pretrained import Encoded, Filling, FineTuned, PreTrained, load
    from bert_jax.inference.scores import Score
    from bert_jax.text.vocabulary_options import VocabularyOptions
    from bert_jax.training.pretrain import Training, pretrain

__all__ = [
    "BertJaxError", "CorpusOptions", "Encoded", "Filling", "FineTuned", "FinetuneConfig",
    "InputError", "PreTrained", "PrepareOptions", "PreparedDataset", "PretrainConfig", "Result",
    "Score", "StudyConfig", "Training", "VocabularyOptions", "__version__", "check", "compile", "evaluate",
    "export", "features", "fill_mask", "finetune", "import_", "inspect", "load", "load_config", "plan_run",
    "predict", "prepare", "pretrain", "report", "score", "study", "vocab",
]  # fmt: skip
