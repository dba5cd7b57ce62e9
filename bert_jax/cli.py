"""The `bert-jax` command: parses, calls one function per subcommand, and turns failures into exit statuses.

0   done
1   a failure in the run
2   input that the user can mend, in one line on stderr
75  saved; the same command continues
"""

import argparse
import errno
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from bert_jax import __version__
from bert_jax.errors import BertJaxError, InputError
from bert_jax.progress import Bars, Progress, silent

_MENDABLE = {  # what is wrong with a path that was given
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EROFS,
}  # fmt: skip

# Imports of a subcommand are its own: `bert-jax prepare` does not wait for JAX.


def entry_point() -> int:
    """`main` in a process of its own."""
    _quiet_background()
    status = main()
    if status and "bert_jax.training.processes" in sys.modules:
        from bert_jax.training.processes import ends_alone

        if ends_alone():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status."""
    parser = _parser()
    words, beam_options = _split(_joined(sys.argv[1:] if arguments is None else arguments))
    options, rest = parser.parse_known_args(words)
    overrides, unknown = _overrides(rest) if hasattr(options, "config") else ([], rest)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    _set_up_logging()
    try:
        if hasattr(options, "config"):
            options.overrides = overrides
        options.beam_options = beam_options
        options.run(options)
        return 0
    except BertJaxError as error:
        return _fail(options.command, str(error), error.exit_status)
    except KeyboardInterrupt:
        return _fail(options.command, "interrupted", 130)
    except Exception as error:
        if _is_disk_full(error):
            where = getattr(error, "filename", None)
            return _fail(
                options.command, f"the disk is full{f' ({where})' if where else ''}: make room and run it again", 2
            )
        if isinstance(error, BrokenPipeError):  # the reader, `head` say, has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        if isinstance(error, OSError) and error.errno in _MENDABLE:
            return _fail(options.command, f"{error.filename or error}: {error.strerror}", 2)
        if (of_store := _of_store(error)) is not None:
            return _fail(options.command, *of_store)
        traceback.print_exc()
        return 1


def _fail(command: str, message: str, status: int) -> int:
    print(f"bert-jax {command}: {' '.join(message.split())}", file=sys.stderr)
    return status


def _of_store(error: Exception) -> tuple[str, int] | None:
    """What a store said to a library that asked it for us, and the exit status; None for any other error."""
    from bert_jax import remote

    found: BaseException | None = error
    while found is not None:
        if not getattr(found, "errno", None):
            if (reason := remote.permanent_reason(found)) is not None:
                return f"{reason} ({remote.said(found)})", 2
            if remote.is_transient(found):
                return f"a store went on failing ({remote.said(found)}): run it again", 1
        found = found.__cause__ or found.__context__
    return None


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(error):  # as TensorStore and ArrayRecord say it
            return True
        error = error.__cause__ or error.__context__
    return False


def _joined(arguments: Sequence[str]) -> list[str]:
    """`--layers -1,-2` as `--layers=-1,-2`: argparse takes whatever begins with a hyphen for an option."""
    joined: list[str] = []
    for word in arguments:
        if joined and joined[-1] == "--layers":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """What of `prepare`'s words is its own, and what stands after `--`, which is for Beam."""
    if words[:1] != ["prepare"] or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _overrides(rest: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """`--config.KEY=VALUE` and `--config.KEY VALUE` out of what argparse did not know, and what is left."""
    overrides, unknown = [], []
    words = iter(rest)
    for word in words:
        if not word.startswith("--config."):
            unknown.append(word)
            continue
        key, equals, value = word.removeprefix("--config.").partition("=")
        if not equals:
            value = next(words, "")
            if not value or value.startswith("--"):
                raise SystemExit(_fail("config", f"--config.{key} wants a value: --config.{key}=VALUE", 2))
        overrides.append((key, value))
    return overrides, unknown


def _set_up_logging() -> None:
    handler = _AboveBars()
    handler.setFormatter(logging.Formatter("%(message)s"))
    package = logging.getLogger("bert_jax")
    package.handlers = [handler]
    package.setLevel(logging.INFO)
    package.propagate = False

    from bert_jax.remote import RetriesSaid

    RetriesSaid.attach()


def _quiet_background() -> None:
    """What fails in a thread of Orbax or TensorStore is raised again where its result is wanted.

    Printed from the thread as well, some hundred lines of traceback would bury the one line that says what to do.
    """
    background = logging.getLogger(f"{__name__}.background")  # below INFO: not shown
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    threading.excepthook = lambda args: background.debug("%s", args.exc_value)
    sys.unraisablehook = lambda args: background.debug("%s", args.exc_value)

    def from_a_thread(kind: Any, error: Any, trace: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = from_a_thread


class _AboveBars(logging.Handler):
    """Writes lines to stderr without tearing the bars that are on it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


def bars() -> Bars:
    """Progress bars on stderr; into a file they write a line now and then."""
    from tqdm import tqdm

    def make(**options: Any) -> Progress:
        interval = 0.2 if sys.stderr.isatty() else 10.0
        return tqdm(file=sys.stderr, dynamic_ncols=True, mininterval=interval, **options)

    return make


# --- Subcommands -------------------------------------------------------------------------------------------------


def _vocab(options: argparse.Namespace) -> None:
    from bert_jax import remote, whole_files
    from bert_jax.data import corpus
    from bert_jax.data.tokenization import WordPieceTokenizer
    from bert_jax.data.vocabulary import train_wordpiece

    output = remote.named(options.output)
    if remote.exists(output):
        raise InputError(f"--output: {output} exists: choose another name or delete it")
    whole_files.make_folder(output.parent)
    reading = corpus.CorpusOptions(documents=options.documents, errors=options.errors)
    slices = corpus.plan(options.input, reading)
    bar = bars()(total=sum(piece.bytes for piece in slices), desc="read", unit="B", unit_scale=True)

    def documents() -> Any:
        for piece in slices:
            yield from corpus.read(piece, reading)
            bar.update(piece.bytes)
        bar.close()
        logging.getLogger(__name__).info("merging pieces ...")

    vocabulary = train_wordpiece(documents(), options.size, lowercase=not options.cased)
    WordPieceTokenizer(vocabulary, lowercase=not options.cased).save_vocabulary(str(output))
    print(f"{output}: {len(vocabulary):,} pieces")


def _prepare(options: argparse.Namespace) -> None:
    from bert_jax.data.prepare import PrepareOptions, describe, prepare
    from bert_jax.data.tokenization import WordPieceTokenizer

    chosen = PrepareOptions(**{name: getattr(options, name) for name in PrepareOptions.__dataclass_fields__})
    tokenizer = WordPieceTokenizer.from_file(options.vocab, lowercase=not options.cased)
    info = prepare(
        options.input, tokenizer, options.output, chosen,
        seed=options.seed, workers=options.workers, scratch=options.scratch, runner=options.runner,
        beam_options=options.beam_options, bars=bars(),
    )  # fmt: skip
    print(json.dumps({"output": options.output, **describe(info)}, indent=2))


def _inspect(options: argparse.Namespace) -> None:
    from bert_jax.data.inspection import inspect_dataset, render

    report = inspect_dataset(options.data, samples=options.samples, seed=options.seed)
    print(json.dumps(report, indent=2, ensure_ascii=False) if options.json else render(report))


def _pretrain(options: argparse.Namespace) -> None:
    from bert_jax.training.stopping import StopSignal

    with StopSignal() as stop:  # before the imports, which take seconds: a signal in them is a signal to the run
        from bert_jax.config import load_config
        from bert_jax.training.pretrain import pretrain
        from bert_jax.training.processes import is_first, joined_processes

        with joined_processes():
            shown = bars() if is_first() else silent
            pretrain(load_config(options.config, options.overrides), options.workdir, stop=stop, bars=shown)


def _evaluate(options: argparse.Namespace) -> None:
    from bert_jax.training.evaluation import evaluate_checkpoint
    from bert_jax.training.processes import is_first, joined_processes

    with joined_processes():
        shown = bars() if is_first() else silent
        values = evaluate_checkpoint(options.checkpoint, options.data, batch_size=options.batch_size, bars=shown)
        if is_first():
            print(json.dumps(values, indent=2))


def _fill_mask(options: argparse.Namespace) -> None:
    from bert_jax.inference import check_mask, fill_mask, load

    for text in options.text:
        check_mask(text)
    pretrained = load(options.checkpoint)
    for text in options.text:
        for fillings in fill_mask(pretrained, text, options.top):
            for filling in fillings:
                print(f"{filling.probability:.4f}  {filling.token:<16}  {filling.text}")
            print()


def _features(options: argparse.Namespace) -> None:
    from bert_jax.features import extract

    extracted = extract(
        options.checkpoint, options.input, options.output,
        layers=options.layers, seq_len=options.seq_len, batch_size=options.batch_size, bars=bars(),
    )  # fmt: skip
    lines = f"{extracted.cut:,} line{'' if extracted.cut == 1 else 's'}"
    print(
        f"{options.output}: {extracted.lines:,} lines, {extracted.tokens:,} tokens, layers {options.layers}"
        + (f"; cut to {extracted.seq_len} tokens: {lines}" if extracted.cut else "")
    )


def _export(options: argparse.Namespace) -> None:
    from bert_jax.interop import huggingface
    from bert_jax.training.checkpoints import open_checkpoint

    checkpoint = open_checkpoint(options.checkpoint)
    architecture = huggingface.export(checkpoint, options.output)
    print(f"{options.output}: {checkpoint.path} in Hugging Face's layout, for {architecture}")


def _import(options: argparse.Namespace) -> None:
    from bert_jax.interop.importing import import_checkpoint

    checkpoint = import_checkpoint(options.source, options.output, lowercase=options.lowercase)
    heads = ", ".join(checkpoint.heads) or "none"
    print(f"{options.output}: {checkpoint.tokenizer}, heads: {heads}")


def _compile(options: argparse.Namespace) -> None:
    from bert_jax.ahead_of_time.command import compile_config
    from bert_jax.ahead_of_time.table import render
    from bert_jax.config import load_config

    described, problems = compile_config(
        load_config(options.config, options.overrides), options.topology,
        slices=options.num_slices, phase=options.phase, largest_batch=options.find_batch, advice=options.advice,
        show=lambda about: None if options.json else print(render(about), end="\n\n", flush=True),
    )  # fmt: skip
    if options.json:
        print(json.dumps(described, indent=2))
    if problems:
        raise InputError("; ".join(problems))


def _report(options: argparse.Namespace) -> None:
    from bert_jax.report import plot_curves

    plot_curves(options.workdir, options.output)
    print(options.output)


# --- Arguments ---------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bert-jax", description="BERT pre-training in JAX and Flax.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(run=run)
        return sub

    def add_corpus(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--input", nargs="+", required=True, metavar="GLOB",
            help="text (a blank line between documents) or JSON lines with a `text` field, also .gz, .bz2, .zst; "
            "`tfds:NAME[:SPLIT[:FEATURE]]` is a dataset of TFDS; `pydoc` is the English that Python carries",
        )  # fmt: skip
        sub.add_argument("--cased", action="store_true", help="keep case and accents")
        sub.add_argument(
            "--documents", choices=["blank_line", "file"], default="blank_line",
            help="what ends a document in plain text: a blank line, or the file (books with blank lines in them)",
        )  # fmt: skip
        sub.add_argument("--errors", choices=["strict", "replace"], default="strict", help="bytes that are not UTF-8")

    def add_checkpoint(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--checkpoint", required=True, metavar="CHECKPOINT",
            help="a workdir, a checkpoints/STEP, or what import wrote",
        )  # fmt: skip

    sub = command("vocab", _vocab, "Train a WordPiece vocabulary.")
    add_corpus(sub)
    sub.add_argument("--output", required=True, metavar="FILE", help="the vocabulary, one piece a line")
    sub.add_argument("--size", type=int, default=30522, help="pieces at the most, special tokens included")

    sub = command("prepare", _prepare, "Make a prepared dataset from raw text.")
    add_corpus(sub)
    sub.add_argument("--vocab", required=True, metavar="FILE", help="the vocabulary")
    sub.add_argument("--output", required=True, metavar="DIR", help="the dataset's folder")
    sub.add_argument("--seq_len", type=int, default=128, help="tokens a sequence, special ones included")
    sub.add_argument(
        "--pairs", choices=["nsp", "none"], default="nsp",
        help="nsp: sentence pairs; none: one segment of whole sentences, for a corpus without documents",
    )  # fmt: skip
    sub.add_argument("--dupe_factor", type=int, default=1, help="passes over the corpus, each with new pairs")
    sub.add_argument("--short_seq_prob", type=float, default=0.1, help="share of documents with a shorter length")
    sub.add_argument(
        "--random_next", choices=["paper", "reference"], default="paper",
        help="paper: half of all pairs are random; reference: a lone sentence always gets a random B (55-61%% random)",
    )  # fmt: skip
    sub.add_argument("--eval_fraction", type=float, default=0.01, help="share of documents held out for evaluation")
    sub.add_argument(
        "--sentences", choices=["split", "lines"], default="split", help="split lines into sentences, or one a line"
    )
    sub.add_argument("--language", default="en", help="ISO 639-1 code, for splitting sentences")
    sub.add_argument("--drop_duplicates", action="store_true", help="of documents with the same text keep one")
    sub.add_argument(
        "--max_line_repeats", type=int, default=0, metavar="N",
        help="drop lines that stand in the corpus more than N times; 0: none",
    )  # fmt: skip
    sub.add_argument("--min_document_tokens", type=int, default=0, help="drop shorter documents")
    sub.add_argument("--max_document_tokens", type=int, default=0, help="drop longer documents; 0: none")
    sub.add_argument("--bucket_tokens", type=int, default=16 << 20, help="tokens a shard, held in memory by a worker")
    sub.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of the local runner")
    sub.add_argument("--scratch", metavar="DIR", help="for unfinished work, on this machine; by default in --output")
    sub.add_argument("--seed", type=int, default=0, help="of pairs, lengths and labels")
    sub.add_argument(
        "--runner", default="local", metavar="RUNNER",
        help="local, or one of Apache Beam: DirectRunner, DataflowRunner, FlinkRunner, SparkRunner, ...; its options "
        "follow after `--`, last of all",
    )  # fmt: skip

    sub = command("inspect", _inspect, "Show what is in a prepared dataset: counts, lengths, padding, instances.")
    sub.add_argument("data", metavar="DIR", help="a prepared dataset")
    sub.add_argument("--samples", type=int, default=3, help="instances to show")
    sub.add_argument("--seed", type=int, default=0, help="of which ones, and of their masks")
    sub.add_argument("--json", action="store_true", help="one object instead of text")

    sub = command("pretrain", _pretrain, "Train with MLM and NSP; run it again to continue.")
    sub.add_argument(
        "--config", required=True, metavar="NAME|FILE.py[:ARG]", help="a config; --config.KEY=VALUE overrides its keys"
    )
    sub.add_argument("--workdir", required=True, metavar="DIR", help="checkpoints, metrics and curves")

    sub = command("evaluate", _evaluate, "MLM and NSP loss and accuracy on a dataset's eval split, as JSON.")
    add_checkpoint(sub)
    sub.add_argument("--data", required=True, metavar="DIR", help="a prepared dataset")
    sub.add_argument("--batch_size", type=int, default=64, help="sequences a batch")

    sub = command("fill-mask", _fill_mask, "The most probable words for each [MASK].")
    add_checkpoint(sub)
    sub.add_argument("--top", type=int, default=5, help="candidates for each mask")
    sub.add_argument("text", nargs="+", help='for example "Paris is the [MASK] of France."')

    sub = command("features", _features, "Write hidden states of chosen layers for each token of a text file.")
    add_checkpoint(sub)
    sub.add_argument(
        "--input", required=True, metavar="FILE", help="one text a line, or two: `first ||| second`; also compressed"
    )
    sub.add_argument("--output", required=True, metavar="FILE", help="JSON lines, or arrays if it ends in .npz")
    sub.add_argument(
        "--layers", default="-1,-2,-3,-4",
        help="by number (0 the first, -1 the last) or name: embeddings, first, second_to_last, last, last_four, all",
    )  # fmt: skip
    sub.add_argument("--seq_len", type=int, help="tokens a line at the most; by default what the model reads")
    sub.add_argument("--batch_size", type=int, default=32, help="lines a batch")

    sub = command("export", _export, "Write a checkpoint in another library's format.")
    add_checkpoint(sub)
    sub.add_argument("--output", required=True, metavar="DIR", help="a new folder")
    sub.add_argument("--format", choices=["hf"], default="hf", help="hf: what transformers loads")

    sub = command("import", _import, "Make a checkpoint of another library's model, to evaluate, train on or export.")
    sub.add_argument(
        "--source", required=True, metavar="DIR",
        help="a folder of transformers: config.json, .safetensors, and vocab.txt or tokenizer.json",
    )  # fmt: skip
    sub.add_argument("--output", required=True, metavar="DIR", help="a new folder")
    case = sub.add_mutually_exclusive_group()
    case.add_argument(
        "--cased", dest="lowercase", action="store_const", const=False,
        help="keep case and accents, whatever the source says",
    )  # fmt: skip
    case.add_argument(
        "--uncased", dest="lowercase", action="store_const", const=True,
        help="lower-case and strip accents, whatever the source says",
    )  # fmt: skip

    sub = command(
        "compile", _compile, "Compile a config's step for TPUs that are not there: memory, collectives, cost."
    )
    sub.add_argument(
        "--config", required=True, metavar="NAME|FILE.py[:ARG]", help="as of pretrain; data.path may be empty"
    )
    sub.add_argument("--topology", required=True, metavar="CHIP:AxB[xC]", help="a slice, as in v5e:4x4 or v5p:2x2x2")
    sub.add_argument("--num_slices", type=int, default=1, help="slices, joined by a slower network")
    sub.add_argument("--phase", type=int, default=None, help="one of the config's phases, counted from 0; all")
    sub.add_argument("--find_batch", action="store_true", help="find the most rows a device that fit")
    sub.add_argument(
        "--advice", action=argparse.BooleanOptionalAction, default=True,
        help="find a setting that makes what does not fit fit",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="one object in place of text")

    sub = command("report", _report, "Draw the curves of one run, or of several side by side.")
    sub.add_argument("workdir", nargs="+", metavar="WORKDIR", help="of pretrain")
    sub.add_argument("--output", required=True, metavar="FILE", help="a .png, .svg or .pdf")
    return parser


if __name__ == "__main__":
    sys.exit(entry_point())
