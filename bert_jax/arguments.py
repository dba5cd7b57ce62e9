"""What the `bert-jax` command takes: its subcommands and their options."""

import argparse
import os
from collections.abc import Callable, Mapping

from bert_jax import __version__


def parser(run: Mapping[str, Callable[[argparse.Namespace], None]]) -> argparse.ArgumentParser:
    """The parser, whose result has the function of the subcommand as `run`; they are given by their names."""
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
            "`tfds:NAME[:SPLIT[:FEATURE]]` is a dataset of TFDS; `pydoc` is the English that Python carries",
        )  # fmt: skip
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

    def add_strict(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--strict", action="store_true", help="refuse rows that cannot be used, which are left out")

    sub = command("vocab", "Train a WordPiece vocabulary.")
    add_corpus(sub)
    sub.add_argument("--cased", action="store_true", help="keep case and accents")
    sub.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="the vocabulary, one piece a line; FILE.json says how it was made",
    )
    sub.add_argument("--size", type=int, default=30522, help="pieces at the most, special tokens included")

    sub = command("prepare", "Make a prepared dataset from raw text.")
    add_corpus(sub)
    sub.add_argument(
        "--vocab", required=True, metavar="FILE",
        help="the vocabulary; its FILE.json, or a capital letter in it, says whether it is cased",
    )  # fmt: skip
    sub.add_argument("--cased", action="store_true", help="keep case and accents, where the vocabulary does not say so")
    sub.add_argument(
        "--allow_unk", type=float, default=0.2, metavar="SHARE", help="refuse text with a larger share of [UNK]"
    )
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
    sub.add_argument("--language", default="en", help="ISO 639-1 code (en, de, ko, ...), for splitting sentences")
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

    sub = command("inspect", "Show what is in a prepared dataset: counts, lengths, padding, instances.")
    sub.add_argument("data", metavar="DIR", help="a prepared dataset")
    sub.add_argument("--samples", type=int, default=3, help="instances to show")
    sub.add_argument("--seed", type=int, default=0, help="of which ones, and of their masks")
    sub.add_argument("--json", action="store_true", help="one object instead of text")

    sub = command("pretrain", "Train with MLM and NSP; run it again to continue.")
    sub.add_argument(
        "--config", required=True, metavar="NAME|FILE.py[:ARG]", help="a config; --config.KEY=VALUE overrides its keys"
    )
    sub.add_argument("--workdir", required=True, metavar="DIR", help="checkpoints, metrics and curves")

    sub = command(
        "evaluate", "Losses and accuracies on a dataset's eval split, or a fine-tuned model's scores on files, as JSON."
    )
    add_checkpoint(sub)
    sub.add_argument(
        "--data", required=True, metavar="DIR|FILE",
        help="a prepared dataset; of a fine-tuned model a labelled file, or the folder of one",
    )  # fmt: skip
    sub.add_argument("--batch_size", type=int, default=64, help="sequences a batch")

    sub = command("finetune", "Train a checkpoint on a task, and score it; run it again to continue.")
    sub.add_argument(
        "--config", required=True, metavar="NAME|FILE.py[:ARG]",
        help="finetune/glue:sst2, finetune/text, or a file; --config.KEY=VALUE overrides its keys",
    )  # fmt: skip
    sub.add_argument("--workdir", required=True, metavar="DIR", help="checkpoints, metrics, scores and predictions")
    add_strict(sub)

    sub = command("predict", "Write a fine-tuned model's predictions for a file, of any kind of task.")
    add_checkpoint(sub)
    sub.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="a file as those trained on, labels aside; of a tagger also plain text, a sentence a line",
    )
    sub.add_argument("--output", required=True, metavar="FILE", help="JSON lines: id, prediction, and more")
    sub.add_argument(
        "--text", nargs="+", default=(), metavar="COLUMN",
        help="columns of the text, or of the two texts; by default those of the file trained on",
    )  # fmt: skip
    add_strict(sub)
    sub.add_argument("--batch_size", type=int, default=64, help="texts a batch")

    sub = command("study", "Pre-train and fine-tune every row of a table; run it again to continue.")
    sub.add_argument(
        "config", metavar="NAME|FILE.py[:ARG]",
        help="studies/table5, or a file; --config.KEY=VALUE overrides its keys, --config.pretraining.KEY those of all "
        "rows' pre-training, --config.finetuning.KEY those of all tasks",
    )  # fmt: skip
    sub.add_argument("--workdir", required=True, metavar="DIR", help="every run's workdir, and the table")

    sub = command("fill-mask", "The most probable words for each [MASK].")
    add_checkpoint(sub)
    sub.add_argument("--top", type=int, default=5, help="candidates for each mask")
    sub.add_argument("text", nargs="+", help='for example "Paris is the [MASK] of France."')

    sub = command("features", "Write hidden states of chosen layers for each token of a text file.")
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

    sub = command("export", "Write a checkpoint in another library's format.")
    add_checkpoint(sub)
    sub.add_argument("--output", required=True, metavar="DIR", help="a new folder")
    sub.add_argument("--format", choices=["hf"], default="hf", help="hf: what transformers loads")

    sub = command("import", "Make a checkpoint of another library's model, to evaluate, train on or export.")
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

    sub = command("compile", "Compile a config's step for TPUs that are not there: memory, collectives, cost.")
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

    sub = command("report", "Draw the curves of one run, or of several side by side.")
    sub.add_argument("workdir", nargs="+", metavar="WORKDIR", help="of pretrain or finetune")
    sub.add_argument("--output", required=True, metavar="FILE", help="a .png, .svg or .pdf")
    return result
