"""Datasets prepared from a few files, and what lies in their folders afterwards."""

from pathlib import Path

from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.prepare import PrepareOptions, prepare

SMALL = {"seq_len": 64, "eval_fraction": 0.1, "sentences": "lines"}


def run(inputs, tokenizer, output, *, seed=0, workers=1, **options):
    inputs = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    prepare(inputs, tokenizer, str(output), PrepareOptions(**{**SMALL, **options}), seed=seed, workers=workers)
    return PreparedDataset(str(output))


def files(folder):
    """Every file below a folder, hidden ones too, and its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def unhidden(folder):
    """The files of `files` that are not of unfinished work."""
    return {name: content for name, content in files(folder).items() if not name.startswith(".prepare")}
