"""Datasets prepared from a few files, and what lies in their folders afterwards."""

from pathlib import Path

from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare

SMALL = {"seq_len": 64, "eval_fraction": 0.1, "sentences": "lines"}


def run(inputs, tokenizer, output, *, seed=0, workers=1, allow_unk=0.2, **options):
    inputs = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    chosen = PrepareOptions(**{**SMALL, **options})
    prepare(inputs, tokenizer, str(output), chosen, seed=seed, workers=workers, allow_unk=allow_unk)
    return PreparedDataset(str(output))


def files(folder):
    """Every file below a folder, hidden ones too, and its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def unhidden(folder):
    """The files of `files` that are not of unfinished work."""
    return {name: content for name, content in files(folder).items() if not name.startswith(".prepare")}
