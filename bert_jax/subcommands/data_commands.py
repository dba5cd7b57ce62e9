"""`vocab`, `prepare` and `inspect`: from text to a prepared dataset."""

import argparse
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_jax.command_line.arguments import make_options
from bert_jax.command_line.command_results import print_result, suggest
from bert_jax.command_line.console import bars
from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.data.preparation.options import PrepareOptions
from bert_jax.errors import InputError
from bert_jax.progress import Bars

if TYPE_CHECKING:
    from etils import epath

    from bert_jax.text.tokenizer import Tokenizer
    from bert_jax.text.vocabulary_options import ExtensionOptions, VocabularyOptions


log = logging.getLogger(__name__)


def run_vocab(options: argparse.Namespace) -> None:
    """Runs `bert-jax vocab`."""
    from bert_jax.files import atomic
    from bert_jax.text.vocabulary_options import ExtensionOptions, VocabularyOptions, check_vocab_options

    training, extension = make_options(VocabularyOptions, options), make_options(ExtensionOptions, options)
    check_vocab_options(options.input, options.source, options.extend, training, extension)
    output = _new_tokenizer_file(options.output)
    if options.source:
        values, text, tokenizer = _convert_vocabulary(options)
    elif options.extend:
        values, text, tokenizer = _extend_vocabulary(options, extension)
    else:
        values, text, tokenizer = _train_vocabulary(options, training)
    atomic.write_whole(output, tokenizer.file_bytes())
    print_result(options, values, text)
    suggest(options)


def _new_tokenizer_file(output: str) -> "epath.Path":
    """Returns the path of a new file. Raises InputError for a path that is taken or does not end in .json."""
    from bert_jax.files import atomic, remote
    from bert_jax.text.tokenizer import FILE

    path = remote.parse_path(output)
    if path.suffix != ".json":
        raise InputError(f"--output={output}: expected a name that ends in .json, such as {FILE}")
    if remote.exists(path):
        raise InputError(f"--output={output}: already exists; choose another path or delete it")
    atomic.check_file_output(output)
    return path


def _convert_vocabulary(options: argparse.Namespace) -> tuple[dict[str, Any], str, "Tokenizer"]:
    from bert_jax.text.conversion import convert_vocabulary

    tokenizer = convert_vocabulary(
        options.source, cased=options.cased, keep_accents=options.keep_accents, pretokenized=options.pretokenized
    )
    return _described(options, tokenizer), f"{options.output}: {tokenizer.vocab_size:,} pieces", tokenizer


def _train_vocabulary(
    options: argparse.Namespace, training: "VocabularyOptions"
) -> tuple[dict[str, Any], str, "Tokenizer"]:
    from bert_jax.text.vocabulary_training import train_vocabulary

    with _documents(options, not training.cased) as documents:
        tokenizer = train_vocabulary(documents, training)
    return _described(options, tokenizer), f"{options.output}: {tokenizer.vocab_size:,} pieces", tokenizer


def _described(options: argparse.Namespace, tokenizer: "Tokenizer") -> dict[str, Any]:
    return {
        "output": options.output, "pieces": tokenizer.vocab_size, "kind": tokenizer.kind,
        "cased": not tokenizer.lowercase,
    }  # fmt: skip


def _extend_vocabulary(
    options: argparse.Namespace, extension: "ExtensionOptions"
) -> tuple[dict[str, Any], str, "Tokenizer"]:
    from bert_jax.text.vocabulary_extension import check_wordpiece, extend_by_documents

    old = _open_tokenizer(options.extend)
    check_wordpiece(old, f"--extend={options.extend}")
    with _documents(options, old.lowercase) as documents:
        extended = extend_by_documents(
            documents, old, number=extension.add, min_count=extension.min_count,
            replace_unused=extension.replace_unused,
        )  # fmt: skip
    pieces, words = extended.tokenizer.vocab_size, extended.words
    values = {
        **_described(options, extended.tokenizer),
        "extends": options.extend, "added": len(words), "replaced_unused": old.vocab_size + len(words) - pieces,
        "tokens_before": extended.tokens_before, "tokens_after": extended.tokens_after,
    }  # fmt: skip
    text = (
        f"{options.output}: {pieces:,} pieces, {len(words):,} of them new, such as {', '.join(words[:5])}; "
        f"{extended.tokens_after:,} tokens in the input instead of {extended.tokens_before:,}"
    )
    return values, text, extended.tokenizer


@contextmanager
def _documents(options: argparse.Namespace, lowercase: bool) -> Iterator[Iterator[str]]:
    """Gives the documents of `--input`, read with a progress bar. Raises InputError at once for a missing file."""
    from bert_jax.data.corpora import corpus
    from bert_jax.data.corpora.standard_input import spooled
    from bert_jax.data.corpora.text_hints import warn_of_text

    reading = make_options(CorpusOptions, options)
    with (
        tempfile.TemporaryDirectory(prefix="bert-jax-vocab-") as folder,
        spooled(options.input, Path(folder)) as (inputs, _),
    ):
        slices = corpus.plan(inputs, reading)
        warn_of_text(slices, reading, lowercase)
        yield _read_documents(slices, reading, bars(quiet=options.quiet))


def _open_tokenizer(location: str) -> "Tokenizer":
    """Opens the tokenizer of a file; or, after the import of JAX, that of a folder."""
    from bert_jax.files import remote
    from bert_jax.text.tokenizer import read_tokenizer

    path = remote.parse_path(location)
    if path.suffix == ".json":
        return read_tokenizer(path)
    log.info("Importing JAX")
    from bert_jax.interop.importing import open_tokenizer

    return open_tokenizer(location)


def _read_documents(slices: Sequence[Any], reading: CorpusOptions, progress: Bars) -> Iterator[str]:
    """Yields the documents of a corpus, with a progress bar."""
    from bert_jax.data.corpora import corpus

    with closing(progress(total=sum(piece.bytes for piece in slices), desc="read", unit="B", unit_scale=True)) as bar:
        for piece in slices:
            yield from corpus.read(piece, reading)
            bar.update(piece.bytes)
    log.info("Corpus read; choosing the pieces ...")


def run_prepare(options: argparse.Namespace) -> None:
    """Runs `bert-jax prepare`."""
    from bert_jax.data.preparation import report
    from bert_jax.data.preparation.pipeline import prepare

    prepare_options = make_options(PrepareOptions, options)
    tokenizer = _open_tokenizer(options.vocab)
    info = prepare(
        options.input, tokenizer, options.output, prepare_options,
        seed=options.seed, workers=options.workers, scratch=options.scratch, runner=options.runner,
        beam_options=options.beam_options, allow_unk=options.allow_unk,
        vocabulary=options.vocab, bars=bars(quiet=options.quiet),
    )  # fmt: skip
    print_result(options, {"output": options.output, **report.describe(info)}, "\n".join(report.render(info)))
    suggest(options)


def run_inspect(options: argparse.Namespace) -> None:
    """Runs `bert-jax inspect`."""
    from bert_jax.data.inspection import inspect_dataset, render

    report = inspect_dataset(options.data, samples=options.samples, seed=options.seed)
    print_result(options, report, "" if options.json else render(report))
    suggest(options)
