"""Options of `bert-jax vocab`, and those of the text that `prepare` shares; each is declared once."""

import dataclasses
from dataclasses import dataclass

from bert_jax.errors import InputError
from bert_jax.option_fields import CheckedOptions, option

WORDPIECE = "wordpiece"
SENTENCEPIECE_KINDS = ("unigram", "bpe")

WORDPIECE_COVERAGE = 0.99995
"""The share of the text's characters that a WordPiece alphabet covers, from the most frequent down.

A word with any other character is [UNK]. Without the limit, rare characters fill the vocabulary: with 1.0, half of
8,192 pieces trained on English Wikipedia are characters like U+10CC0.
"""
SENTENCEPIECE_COVERAGE = 0.9995
"""The default of the `sentencepiece` library."""

MAX_PIECES = 1 << 22
"""Maximum pieces of a vocabulary to train: the trainers allocate memory for all before they count a word."""

SAMPLE_BYTES = 128 << 20
"""Maximum bytes of normalized text that the trainer of `sentencepiece` gets. It needs some ten times as much memory."""


@dataclass(frozen=True)
class TextOptions(CheckedOptions):
    """Rules for the text of a vocabulary. `prepare` takes them from the vocabulary's record, if it has one."""

    cased: bool = option(False, "keep case and accents")
    keep_accents: bool = option(
        False, "keep accents in lower-cased text; Korean, Japanese, Hindi, Thai, ... need it with --kind=wordpiece"
    )
    pretokenized: bool = option(
        False, "text is already split into words or morphemes by white space: keep them; do not drop characters"
    )


@dataclass(frozen=True)
class VocabularyOptions(TextOptions):
    """Options that, with a corpus, determine a vocabulary."""

    kind: str = option(
        WORDPIECE,
        "wordpiece, as BERT; unigram or bpe: a SentencePiece model, as for text without spaces, such as Thai",
        choices=(WORDPIECE, *SENTENCEPIECE_KINDS),
    )
    size: int = option(30522, "maximum number of pieces, special tokens included", low=1, high=MAX_PIECES)
    character_coverage: float = option(
        0.0,
        "share of the text's characters that become pieces; words with others are [UNK]; "
        f"0: {WORDPIECE_COVERAGE} for wordpiece, {SENTENCEPIECE_COVERAGE} for unigram and bpe",
        low=0,
        high=1,
        metavar="SHARE",
    )
    sample_bytes: int = option(
        0,
        f"unigram, bpe: bytes of text to train on, chosen by hash; memory is some ten times as much; 0: {SAMPLE_BYTES}",
        low=0,
        metavar="N",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == WORDPIECE and self.sample_bytes:
            raise InputError(f"--sample_bytes={self.sample_bytes}: --kind=wordpiece counts the words of the whole text")
        if self.kind != WORDPIECE and self.pretokenized:
            raise InputError(f"--pretokenized: pieces of --kind={self.kind} never cross a space; remove --pretokenized")

    @property
    def coverage(self) -> float:
        """The share of the text's characters that become pieces."""
        return self.character_coverage or (WORDPIECE_COVERAGE if self.kind == WORDPIECE else SENTENCEPIECE_COVERAGE)

    @property
    def strip_accents(self) -> bool:
        """True if accents are stripped."""
        return not (self.cased or self.keep_accents)


@dataclass(frozen=True)
class ExtensionOptions(CheckedOptions):
    """Options of `vocab --extend`."""

    add: int = option(1000, "with --extend: maximum number of new words", low=1, metavar="N")
    min_count: int = option(10, "with --extend: new words occur at least so often in the input", low=1, metavar="N")
    replace_unused: bool = option(
        False, "with --extend: new words first replace the [unusedN] pieces, and the rest is appended"
    )


def check_extension(extend: str | None, training: VocabularyOptions, extension: ExtensionOptions) -> None:
    """Raises InputError for options of `vocab` that have no effect with `--extend`, or without it."""
    unused: CheckedOptions = training if extend else extension
    for field in dataclasses.fields(unused):  # type: ignore[arg-type]
        value = getattr(unused, field.name)
        if value == field.default or (extend and field.name in TextOptions.__dataclass_fields__):
            continue
        given = f"--{field.name}" if value is True else f"--{field.name}={value}"
        fix = f"remove it, or --extend={extend}" if extend else f"add --extend FILE, or remove --{field.name}"
        raise InputError(f"{given}: has no effect {'with' if extend else 'without'} --extend; {fix}")
