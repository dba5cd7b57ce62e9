"""Subcommands and options of the `bert-jax` command."""

import argparse
import os
from collections.abc import Callable, Mapping

from bert_jax import __version__


def parser(run: Mapping[str, Callable[[argparse.Namespace], None]]) -> argparse.ArgumentParser:
    """Returns the parser. Parsed options hold the subcommand's function as `run`, taken from `run` by its name."""
    result = argparse.ArgumentParser(prog="bert-jax", description="BERT pre-training in JAX and Flax.")
    result.add_argument("--version", action="version", version=__version__)
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(run=run[name])
        return sub

    def add_corpus(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--input", nargs="+", required=True, metavar="GLOB",
            help="text (a blank line between documents) or JSON lines with a `text` field, also .gz, .bz2, .zst; "
            "`tfds:NAME[:SPLIT[:FEATURE]]` is a TFDS dataset; `pydoc` is Python's own documentation, in English",
        )  # fmt: skip
        sub.add_argument(
            "--documents", choices=["blank_line", "file"], default="blank_line",
            help="document separator in plain text: a blank line, or the end of the file (for text with blank lines)",
        )  # fmt: skip
        sub.add_argument("--errors", choices=["strict", "replace"], default="strict", help="how to read invalid UTF-8")

    def add_checkpoint(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--checkpoint", required=True, metavar="CHECKPOINT",
            help="a workdir, a checkpoints/STEP folder, or the output of import",
        )  # fmt: skip

    def add_strict(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--strict", action="store_true", help="fail on a bad row instead of skipping it")

    sub = command("vocab", "Train a WordPiece vocabulary.")
    add_corpus(sub)
    sub.add_argument("--cased", action="store_true", help="keep case and accents")
    sub.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="the vocabulary, one piece per line; FILE.json records how it was trained",
    )
    sub.add_argument("--size", type=int, default=30522, help="maximum number of pieces, special tokens included")

    sub = command("prepare", "Prepare a dataset from raw text.")
    add_corpus(sub)
    sub.add_argument(
        "--vocab", required=True, metavar="FILE",
        help="the vocabulary; FILE.json, or an uppercase letter in the vocabulary, determines whether it is cased",
    )  # fmt: skip
    sub.add_argument("--cased", action="store_true", help="keep case and accents, if not known from the vocabulary")
    sub.add_argument(
        "--allow_unk", type=float, default=0.2, metavar="SHARE", help="maximum share of [UNK] tokens before failing"
    )
    sub.add_argument("--output", required=True, metavar="DIR", help="the dataset's folder")
    sub.add_argument("--seq_len", type=int, default=128, help="tokens per sequence, special tokens included")
    sub.add_argument(
        "--pairs", choices=["nsp", "none"], default="nsp",
        help="nsp: sentence pairs; none: one segment of complete sentences, for a corpus without documents",
    )  # fmt: skip
    sub.add_argument("--dupe_factor", type=int, default=1, help="passes over the corpus, each with new pairs")
    sub.add_argument("--short_seq_prob", type=float, default=0.1, help="share of documents with a shorter target")
    sub.add_argument(
        "--random_next", choices=["paper", "reference"], default="paper",
        help="paper: half of all pairs are random; reference: a lone sentence always gets a random B (55-61%% random)",
    )  # fmt: skip
    sub.add_argument("--eval_fraction", type=float, default=0.01, help="share of documents held out for evaluation")
    sub.add_argument(
        "--sentences", choices=["split", "lines"], default="split", help="split lines into sentences, or one a line"
    )
    sub.add_argument("--language", default="en", help="ISO 639-1 code (en, de, ko, ...), for splitting sentences")
    sub.add_argument("--drop_duplicates", action="store_true", help="drop duplicate documents (same text)")
    sub.add_argument(
        "--max_line_repeats", type=int, default=0, metavar="N",
        help="drop lines that occur more than N times in the corpus; 0: off",
    )  # fmt: skip
    sub.add_argument("--min_document_tokens", type=int, default=0, help="drop shorter documents")
    sub.add_argument("--max_document_tokens", type=int, default=0, help="drop longer documents; 0: off")
    sub.add_argument(
        "--bucket_tokens", type=int, default=16 << 20, help="tokens per shard, the unit in a worker's memory"
    )
    sub.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of the local runner")
    sub.add_argument("--scratch", metavar="DIR", help="local folder for temporary files; default: inside --output")
    sub.add_argument("--seed", type=int, default=0, help="seed of pairs, lengths and labels")
    sub.add_argument(
        "--runner", default="local", metavar="RUNNER",
        help="local, or an Apache Beam runner: DirectRunner, DataflowRunner, FlinkRunner, SparkRunner, ...; its "
        "options follow `--` at the end of the command",
    )  # fmt: skip

    sub = command("inspect", "Show counts, lengths, padding and instances of a prepared dataset.")
    sub.add_argument("data", metavar="DIR", help="a prepared dataset")
    sub.add_argument("--samples", type=int, default=3, help="instances to show")
    sub.add_argument("--seed", type=int, default=0, help="seed of the sampled instances and their masks")
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    sub = command("pretrain", "Pre-train with MLM and NSP; run it again to resume.")
    sub.add_argument(
        "--config", required=True, metavar="NAME|FILE.py[:ARG]", help="a config; --config.KEY=VALUE overrides its keys"
    )
    sub.add_argument("--workdir", required=True, metavar="DIR", help="folder of checkpoints, metrics and curves")

    sub = command(
        "evaluate", "Print JSON: loss and accuracy on a dataset's eval split, or a fine-tuned model's scores on files."
    )
    add_checkpoint(sub)
    sub.add_argument(
        "--data", required=True, metavar="DIR|FILE",
        help="a prepared dataset; for a fine-tuned model, a labelled file or its folder",
    )  # fmt: skip
    sub.add_argument("--batch_size", type=int, default=64, help="sequences per batch")

    sub = command("finetune", "Fine-tune a checkpoint on a task and score it; run it again to resume.")
    sub.add_argument(
        "--config", required=True, metavar="NAME|FILE.py[:ARG]",
        help="finetune/glue:sst2, finetune/text, or a file; --config.KEY=VALUE overrides its keys",
    )  # fmt: skip
    sub.add_argument("--workdir", required=True, metavar="DIR", help="checkpoints, metrics, scores and predictions")
    add_strict(sub)

    sub = command("predict", "Write a fine-tuned model's predictions for a file, for any kind of task.")
    add_checkpoint(sub)
    sub.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="a file in the format of the training file, labels ignored; a tagger also reads one sentence per line",
    )
    sub.add_argument("--output", required=True, metavar="FILE", help="JSON lines with id, prediction and scores")
    sub.add_argument(
        "--text", nargs="+", default=(), metavar="COLUMN",
        help="one or two text columns; default: those of the training file",
    )  # fmt: skip
    add_strict(sub)
    sub.add_argument("--batch_size", type=int, default=64, help="texts per batch")

    sub = command("study", "Pre-train and fine-tune every row of a table; run it again to resume.")
    sub.add_argument(
        "config", metavar="NAME|FILE.py[:ARG]",
        help="studies/table5, or a file; --config.KEY=VALUE overrides its keys, --config.pretraining.KEY a key of "
        "every row's pre-training, --config.finetuning.KEY a key of every task",
    )  # fmt: skip
    sub.add_argument("--workdir", required=True, metavar="DIR", help="folder of all runs' workdirs and of the table")

    sub = command("fill-mask", "Print the most probable words for each [MASK].")
    add_checkpoint(sub)
    sub.add_argument("--top", type=int, default=5, help="candidates per mask")
    sub.add_argument("text", nargs="+", help='for example "Paris is the [MASK] of France."')

    sub = command("features", "Write hidden states of chosen layers for each token of a text file.")
    add_checkpoint(sub)
    sub.add_argument(
        "--input", required=True, metavar="FILE", help="one text per line, or two: `first ||| second`; also compressed"
    )
    sub.add_argument("--output", required=True, metavar="FILE", help="JSON lines, or arrays if it ends in .npz")
    sub.add_argument(
        "--layers", default="-1,-2,-3,-4",
        help="numbers (0 is the first, -1 the last) or names: embeddings, first, second_to_last, last, last_four, all",
    )  # fmt: skip
    sub.add_argument("--seq_len", type=int, help="maximum tokens per line; default: the model's maximum")
    sub.add_argument("--batch_size", type=int, default=32, help="lines per batch")

    sub = command("export", "Write a checkpoint in another library's format.")
    add_checkpoint(sub)
    sub.add_argument("--output", required=True, metavar="DIR", help="a new folder")
    sub.add_argument("--format", choices=["hf"], default="hf", help="hf: Hugging Face transformers")

    sub = command("import", "Import a checkpoint from another library's format, to evaluate, train or export it.")
    sub.add_argument(
        "--source", required=True, metavar="DIR",
        help="a transformers folder: config.json, .safetensors, and vocab.txt or tokenizer.json",
    )  # fmt: skip
    sub.add_argument("--output", required=True, metavar="DIR", help="a new folder")
    case = sub.add_mutually_exclusive_group()
    case.add_argument(
        "--cased", dest="lowercase", action="store_const", const=False,
        help="keep case and accents, regardless of the source's settings",
    )  # fmt: skip
    case.add_argument(
        "--uncased", dest="lowercase", action="store_const", const=True,
        help="lowercase and strip accents, regardless of the source's settings",
    )  # fmt: skip

    sub = command("compile", "Compile a config's training step ahead of time for TPUs: memory, collectives, cost.")
    sub.add_argument(
        "--config", required=True, metavar="NAME|FILE.py[:ARG]", help="a config of pretrain; data.path may be empty"
    )
    sub.add_argument("--topology", required=True, metavar="CHIP:AxB[xC]", help="a slice, such as v5e:4x4 or v5p:2x2x2")
    sub.add_argument("--num_slices", type=int, default=1, help="slices, connected by a slower network")
    sub.add_argument("--phase", type=int, default=None, help="compile one phase, numbered from 0; default: all")
    sub.add_argument("--find_batch", action="store_true", help="find the maximum number of rows per device that fits")
    sub.add_argument(
        "--advice", action=argparse.BooleanOptionalAction, default=True,
        help="if the step does not fit, search for a setting that does",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    sub = command("report", "Draw the curves of one run, or of several side by side.")
    sub.add_argument("workdir", nargs="+", metavar="WORKDIR", help="a workdir of pretrain or finetune")
    sub.add_argument("--output", required=True, metavar="FILE", help="a .png, .svg or .pdf")
    return result
