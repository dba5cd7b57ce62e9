"""Warnings about a corpus whose documents do not match `--documents` and `--pairs`."""

import logging
from collections.abc import Sequence

from bert_jax.data.corpora import tfds_corpus
from bert_jax.data.dataset import SplitInfo
from bert_jax.errors import InputError
from bert_jax.files.text_files import text_format

log = logging.getLogger(__name__)

_SHORT_DOCUMENT = 6  # sentences; paragraphs of prose have 1 to 6, 3.0 on average, articles of Wikipedia 15 to 21
_DOCUMENTS_PER_FILE = 50
_SAMPLED_FILES = 8
_FEWEST_PAIRS = 200
_RANDOM_SHARE = {"paper": 0.65, "reference": 0.75}  # expected: 0.5, and 0.55 to 0.61


def warn_of_short_documents(files: Sequence[str], splits: Sequence[SplitInfo]) -> None:
    """Logs a warning if splitting plain text at blank lines gave many documents of few sentences.

    Args:
      files: the files of the corpus.
      splits: the splits of the dataset.
    """
    documents = sum(split.documents for split in splits)
    mean = sum(split.sentences for split in splits) / max(1, documents)
    if documents < _DOCUMENTS_PER_FILE * len(files) or mean >= _SHORT_DOCUMENT or not _are_plain_text(files):
        return
    log.warning(
        "%s documents in %s file(s) have %.1f sentences on average: blank lines seem to separate paragraphs, and no "
        "sentence pair crosses them. If each file is a document, such as a book, pass --documents file; otherwise keep "
        "blank lines only between documents",
        f"{documents:,}",
        f"{len(files):,}",
        mean,
    )


def warn_of_random_pairs(split: SplitInfo, rule: str) -> None:
    """Logs a warning if far more pairs of a split have a random second segment than `--random_next` implies."""
    share = split.random_next / max(1, split.instances)
    if split.instances < _FEWEST_PAIRS or share <= _RANDOM_SHARE[rule]:
        return
    log.warning(
        "%.0f%% of the sentence pairs have a random second segment (expected for --random_next=%s: %s). Documents of "
        "one sentence have no next sentence, so next-sentence prediction learns little. If each file is a document, "
        "pass --documents file; for a corpus of single sentences, pass --pairs none",
        100 * share,
        rule,
        "50%" if rule == "paper" else "55-61%",
    )


def _are_plain_text(files: Sequence[str]) -> bool:
    """Returns True if most of a sample of files are plain text, whose documents only blank lines separate."""
    sample = files[:: -(-len(files) // _SAMPLED_FILES)]
    try:
        found = [not tfds_corpus.is_tfds(path) and text_format(path) == "text" for path in sample]
    except InputError:  # A file deleted since it was read does not affect the finished dataset.
        return False
    return 2 * sum(found) > len(found)
