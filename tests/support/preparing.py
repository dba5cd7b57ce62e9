"""Helpers to prepare datasets from a few files and to read the resulting folders."""

from pathlib import Path

from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.preparation.pipeline import PrepareOptions, prepare
from bert_jax.files import provenance

SMALL = {"seq_len": 64, "eval_fraction": 0.1, "sentences": "lines"}


def run(inputs, tokenizer, output, *, seed=0, workers=1, **options):
    inputs = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    small = {**SMALL, "sentences": "split"} if "ids_field" in options else SMALL  # ids have no lines
    chosen = PrepareOptions(**{**small, **options})
    prepare(inputs, tokenizer, str(output), chosen, seed=seed, workers=workers)
    return PreparedDataset(str(output))


def files(folder):
    """Returns the bytes of every file below a folder, hidden ones included, by path; without the record of the run."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != provenance.FILE]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
