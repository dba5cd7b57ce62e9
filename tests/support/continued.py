"""Continued pre-training in tests: an imported checkpoint, a domain with new words, and a short config."""

from pathlib import Path

from support import helpers, sources

from bert_jax.config import PretrainConfig, load_config
from bert_jax.training.checkpoints import Checkpoint


def write_init(folder: Path, vocabulary: list[str], **options: object) -> Checkpoint:
    """Writes a checkpoint with random parameters, as `import` does, whose tables two devices can divide."""
    return sources.write_checkpoint(folder, vocabulary, **{"num_attention_heads": 4, **options})  # type: ignore


def write_domain(folder: Path, vocabulary: list[str], **options: object) -> Path:
    """Prepares a dataset of a domain with new words."""
    folder.mkdir()
    text = helpers.make_corpus(documents=80, seed=3)
    for word, new in {"ship": "shipwreck", "moon": "moonlit", "sailor": "sailorboy"}.items():
        text = text.replace(f"the {word} ", f"the {new} ", 200)
    (folder / "corpus.txt").write_text(text)
    helpers.write_tokenizer(folder / "tokenizer.json", vocabulary)
    helpers.prepare_dataset(folder / "corpus.txt", folder / "tokenizer.json", folder / "data", **options)
    return folder / "data"


def config(data: Path, source: Path | Checkpoint, **overrides: object) -> PretrainConfig:
    """Returns a run of `continue` of seconds; in `overrides`, double underscores stand for dots."""
    chosen = {
        "data__path": data, "init": source.path if isinstance(source, Checkpoint) else source, "total_steps": 4,
        "global_batch_size": 16, "optimizer__warmup_steps": 1, "log_every_steps": 1, "eval_every_steps": 2,
        "eval_batches": 2, "checkpoint__every_steps": 2, "tracking__samples": 0, "scan_layers": False,
        **overrides,
    }  # fmt: skip
    return load_config("continue", [(key.replace("__", "."), str(value)) for key, value in chosen.items()])
