"""Language codes of `--language`: those of ISO 639, which select the sentence rules of `sentencex`."""

import logging
import re

from bert_jax.errors import InputError

log = logging.getLogger(__name__)

_OWN_RULES = "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk"
OWN_RULES = frozenset(_OWN_RULES.split())
"""The languages that sentencex has rules for."""

WITHOUT_SENTENCE_MARKS = {"th": "Thai", "lo": "Lao"}
"""Languages whose texts have spaces between clauses and sentences, and mostly no mark at the end of a sentence."""

_CODE = re.compile(r"[a-z]{2,3}(-[a-z0-9]+)*")


def check_language(code: str) -> None:
    """Raises InputError for what is no language code, such as a name of a language."""
    if not _CODE.fullmatch(code):
        raise InputError(
            f"--language={code!r}: expected an ISO 639-1 code in lower case, such as de; those with sentence rules of "
            f"their own are {', '.join(sorted(OWN_RULES))}"
        )


def warn_of_language(code: str) -> None:
    """Logs a warning if lines of a language are split into sentences by the rules of another one."""
    if code in WITHOUT_SENTENCE_MARKS:
        log.warning(
            "--language=%s: %s has no mark at the end of a sentence, so sentences end only with their line and at "
            '".", "!" and "?"; write one sentence a line and pass --sentences lines, or pass --pairs none',
            code,
            WITHOUT_SENTENCE_MARKS[code],
        )
    elif code not in OWN_RULES:
        log.warning(
            "--language=%s has no sentence rules of its own: using those of a related language or English", code
        )
