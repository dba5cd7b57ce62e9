"""Warnings about a corpus whose documents are not what `--documents` and `--pairs` take them for."""

import logging
from collections.abc import Sequence

from bert_jax.data.dataset import SplitInfo
from bert_jax.data.preparation import tfds_corpus
from bert_jax.data.preparation.corpus import PYDOC
from bert_jax.errors import InputError
from bert_jax.files.file_formats import text_format

log = logging.getLogger(__name__)

_SHORT_DOCUMENT = 6  # sentences; paragraphs of prose have 1 to 6, 3.0 on average, articles of Wikipedia 15 to 21
_DOCUMENTS_A_FILE = 50
_LOOKED_AT = 8  # files
_FEWEST_PAIRS = 200
_RANDOM_SHARE = {"paper": 0.65, "reference": 0.75}  # expected: 0.5, and 0.55 to 0.61


def warn_of_short_documents(files: Sequence[str], splits: Sequence[SplitInfo]) -> None:
    """Logs a warning where plain text was cut at blank lines into many documents of few sentences.

    Args:
      files: those of the corpus.
      splits: what they became.
    """
    documents = sum(split.documents for split in splits)
    mean = sum(split.sentences for split in splits) / max(1, documents)
    if documents < _DOCUMENTS_A_FILE * len(files) or mean >= _SHORT_DOCUMENT or not _are_plain_text(files):
        return
    log.warning(
        "%s documents in %s file(s), with %.1f sentences each: blank lines seem to separate paragraphs, so no sentence "
        "pair crosses one. If each file is a document, as a book is, pass --documents file; otherwise keep blank lines "
        "between documents alone",
        f"{documents:,}",
        f"{len(files):,}",
        mean,
    )


def warn_of_random_pairs(split: SplitInfo, rule: str) -> None:
    """Logs a warning where nearly all pairs of a split have a random second segment, whatever `--random_next` says."""
    share = split.random_next / max(1, split.instances)
    if split.instances < _FEWEST_PAIRS or share <= _RANDOM_SHARE[rule]:
        return
    log.warning(
        "%.0f%% of the sentence pairs have a random second segment (--random_next %s aims at %s): documents of one "
        "sentence have no next one, and next-sentence prediction learns little. If each file is a document, pass "
        "--documents file; prepare a corpus of lone sentences with --pairs none",
        100 * share,
        rule,
        "50%" if rule == "paper" else "55-61%",
    )


def _are_plain_text(files: Sequence[str]) -> bool:
    """True where most of a few files are plain text, whose documents are marked by blank lines alone."""
    some = files[:: -(-len(files) // _LOOKED_AT)]
    try:
        found = [path != PYDOC and not tfds_corpus.is_tfds(path) and text_format(path) == "text" for path in some]
    except InputError:  # A file that is gone since it was read does not matter to a dataset that is complete.
        return False
    return 2 * sum(found) > len(found)
