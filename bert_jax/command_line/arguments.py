"""Subcommands and options of the `bert-jax` command.

An option that is a field of a dataclass is declared there. All others are declared here.
"""

import argparse
import dataclasses
import difflib
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from bert_jax import __version__, config_listing
from bert_jax.command_line.command_help import COMMAND_HELP
from bert_jax.data.corpora.corpus_options import CorpusOptions
from bert_jax.data.preparation.options import MAX_SHARE, PrepareOptions
from bert_jax.text.vocabulary_options import ExtensionOptions, VocabularyOptions

SHELLS = ("bash", "zsh", "fish", "tcsh")
_PATHS = ("GLOB", "FILE", "DIR", "DIR|FILE", "CHECKPOINT", "FILE|CHECKPOINT", "WORKDIR")
"""Metavars of paths, which shells complete."""

Subcommand = Callable[[argparse.Namespace], None]
Options = TypeVar("Options")


def _numbers(text: str) -> list[int]:
    """Parses numbers such as "0,2,4"."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers such as 0,2,4") from error


def parse(arguments: Sequence[str], run: Mapping[str, Subcommand]) -> argparse.Namespace:
    """Returns the options of a subcommand, with its function from `run` as `run`, and `overrides` and `beam_options`.

    `overrides` are (key, text) pairs of the config, from `--config.KEY=VALUE` or `--config.KEY VALUE`. `beam_options`
    are the words after `--` of `prepare`.

    Raises SystemExit, with the reason in one line on stderr, for an argument that the subcommand does not accept.
    """
    parser, commands = _parsers(run)
    command = commands.get(arguments[0]) if arguments else None
    if command is None:
        if arguments and not arguments[0].startswith("-"):
            close = difflib.get_close_matches(arguments[0], commands, 1)
            parser.error(f"{arguments[0]}: unknown command{f'; did you mean {close[0]}?' if close else ''}")
        return parser.parse_args(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    accepted, overrides, after = list(arguments[:1]), [], list(arguments[end:])
    words = iter(arguments[1:end])
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--config.") and command.get_default("overridable"):
            if not equals:
                value = next(words, "")
                if not value or value.startswith("--"):
                    command.error(f"{name}: expected a value; use {name}=VALUE")
            overrides.append((name.removeprefix("--config."), value))
        elif accepted[-1] in command.options and word[:1] == "-" and word[1:2].isdigit():
            accepted[-1] += f"={word}"  # argparse takes `-1,-2` for an option, and not for a value
        else:
            command.check_option(word)
            accepted.append(word)
    beam_options = after[1:] if arguments[0] == "prepare" else []
    options = parser.parse_args(accepted if beam_options else accepted + after)
    options.overrides, options.beam_options = overrides, beam_options
    if options.command == "pretrain" and not options.dry_run:
        if options.workdir is None:
            command.error("the following arguments are required: --workdir")
        if planning := [name for name in ("device", "devices", "mfu") if getattr(options, name) is not None]:
            command.error(f"--{planning[0]}: expected only with --dry_run; a run uses the devices of the machine")
    return options


def completion(shell: str) -> str:
    """Returns the script that completes commands, options, paths and names of configs in `shell`, one of SHELLS."""
    import shtab

    parser, commands = _parsers(dict.fromkeys(COMMAND_HELP, lambda _: None))
    for command in commands.values():
        for action in command.actions:
            if action.dest == "config":
                action.complete = shtab.cmd(f"echo {' '.join(config_listing.summaries(command.configs))}")  # type: ignore
            elif action.metavar in _PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def make_options(fields: type[Options], options: argparse.Namespace) -> Options:
    """Creates the dataclass `fields` from parsed options. Raises InputError as its constructor does."""
    names = [field.name for field in dataclasses.fields(fields) if "help" in field.metadata]  # type: ignore[arg-type]
    return fields(**{name: getattr(options, name) for name in names})


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Adds defaults to the help of options, and keeps the lines of the epilog."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shows_nothing = action.default in (None, False, ()) or action.required
        return action.help if shows_nothing else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, without the usage."""

    configs = ""
    """The command, a key of `config_listing.KINDS`, whose configs `--help` lists."""

    @property
    def epilog(self) -> str:
        """The end of the help, from `COMMAND_HELP`. It reads the configs, and is made only when it is needed."""
        return _epilog(self.get_default("command_name"), self.configs)

    @epilog.setter
    def epilog(self, value: str | None) -> None:
        """Ignores the value that argparse sets."""

    @property
    def options(self) -> list[str]:
        """The options that the parser knows. argparse lists them in no public attribute."""
        return list(self._option_string_actions)

    @property
    def actions(self) -> list[argparse.Action]:
        """Options and positional arguments."""
        return self._actions

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def check_option(self, word: str) -> None:
        """Exits for a word that is a misspelt option. argparse would first report the options that it is missing."""
        name = word.partition("=")[0]
        if name.startswith("--") and " " not in word and name not in self.options:
            close = difflib.get_close_matches(name, self.options, 1)
            self.error(f"{word}: unknown option{f'; did you mean {close[0]}?' if close else ''}")

    def add_fields(self, fields: type) -> None:
        """Adds an option for each field that has a help text: `--NAME`, with its type, default and choices."""
        for field in dataclasses.fields(fields):
            if "help" not in field.metadata:
                continue
            kind: dict[str, Any] = {"action": "store_true"}
            if field.type is not bool:
                kind = {"type": field.type, "default": field.default}
                kind |= {key: field.metadata[key] for key in ("choices", "metavar") if key in field.metadata}
            self.add_argument(f"--{field.name}", help=field.metadata["help"].replace("%", "%%"), **kind)


def _epilog(command: str | None, configs: str) -> str:
    if command is None:
        return (
            "bert-jax COMMAND --help has options and examples\nexit status: 0 done, 1 failed, 2 wrong input, 75 saved"
        )
    about = COMMAND_HELP[command]
    lines = [f"reads: {about.reads}", f"writes: {about.writes}"]
    if configs:
        found = config_listing.summaries(configs)
        width = max(map(len, found))
        lines += ["", "configs:"]
        for name, text in found.items():
            lines += textwrap.wrap(
                f"{name:<{width}}  {text}", 100, initial_indent="  ", subsequent_indent=" " * (width + 4)
            )
        lines.append("keys, values and comments of a config: bert-jax configs NAME")
    return "\n".join([*lines, "", "examples:", *(f"  bert-jax {example}" for example in about.examples)])


def _parsers(run: Mapping[str, Subcommand]) -> tuple[_Parser, dict[str, _Parser]]:
    """Returns the parser of the whole command line, and those of the subcommands by name."""
    result = _Parser(prog="bert-jax", description="BERT pre-training in JAX and Flax.", formatter_class=_HelpFormatter)
    result.add_argument("--version", action="version", version=__version__)
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> _Parser:
        sub: _Parser = commands.add_parser(
            name, help=text, description=text, formatter_class=_HelpFormatter, allow_abbrev=False
        )
        sub.set_defaults(run=run[name], command_name=name)
        sub.add_argument("--quiet", action="store_true", help="show only errors on stderr; results are printed")
        return sub

    def add_json(sub: _Parser) -> None:
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    def add_input(sub: _Parser, *, required: bool = True) -> None:
        sub.add_argument(
            "--input", nargs="+", required=required, metavar="GLOB",
            help="files, folders or patterns: text (a blank line between documents), JSON lines, CSV, TSV, also .gz, "
            ".bz2, .xz, .zst; Parquet, Arrow; `hf://datasets/NAME/...` and other stores; `-` is stdin; "
            "`tfds:NAME[:SPLIT[:FEATURE]]` is a TFDS dataset",
        )  # fmt: skip

    def add_config(sub: _Parser, name: str, metavar: str, text: str, **options: Any) -> None:
        sub.add_argument(name, metavar=metavar, help=text, **options)
        sub.set_defaults(overridable=True)
        command_name = sub.get_default("command_name")
        sub.configs = command_name if command_name in config_listing.KINDS else "pretrain"

    def add_checkpoint(sub: _Parser) -> None:
        sub.add_argument(
            "--checkpoint", required=True, metavar="CHECKPOINT",
            help="a workdir, a checkpoints/STEP folder, or the output of import; or what import reads: a folder of "
            "transformers, such as the output of export, or a TensorFlow checkpoint",
        )  # fmt: skip

    def add_strict(sub: _Parser) -> None:
        sub.add_argument("--strict", action="store_true", help="fail on a bad row instead of skipping it")

    sub = command("check", "Check in minutes that the devices of this machine or slice train, resume and agree.")
    sub.add_argument(
        "--workdir", metavar="DIR",
        help="where runs and checkpoints are written, into a new folder that is removed; required with several "
        "processes, which must all see it; default: a temporary folder",
    )  # fmt: skip
    add_json(sub)

    sub = command("vocab", "Train a vocabulary: WordPiece, Unigram, BPE or byte-level BPE; or extend or convert one.")
    add_input(sub, required=False)
    sub.add_fields(CorpusOptions)
    sub.add_fields(VocabularyOptions)
    sub.add_argument(
        "--output", required=True, metavar="FILE",
        help="a new tokenizer.json: the vocabulary and the rules for text",
    )  # fmt: skip
    sub.add_argument(
        "--extend", metavar="FILE|CHECKPOINT",
        help="a tokenizer.json of WordPiece, or a folder with one, as for `prepare --vocab`; its ids keep their "
        "meaning, and the words of the input that it splits are added, those first that save the most tokens",
    )  # fmt: skip
    sub.add_argument(
        "--from", dest="source", metavar="FILE",
        help="instead of --input: convert a vocab.txt, or a SentencePiece model (its name ends in .model)",
    )  # fmt: skip
    sub.add_fields(ExtensionOptions)
    add_json(sub)

    sub = command("prepare", "Prepare a dataset from raw text.")
    add_input(sub)
    sub.add_argument(
        "--vocab", required=True, metavar="FILE|CHECKPOINT",
        help="a tokenizer.json, or a folder with one: a dataset, an export or a model of transformers; or a checkpoint",
    )  # fmt: skip
    sub.add_argument(
        "--allow_unk", type=float, default=MAX_SHARE, metavar="SHARE",
        help="maximum share of [UNK] tokens before failing",
    )  # fmt: skip
    sub.add_argument("--output", required=True, metavar="DIR", help="the dataset's folder, new or empty")
    sub.add_fields(PrepareOptions)
    sub.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of the local runner")
    sub.add_argument("--scratch", metavar="DIR", help="local folder for temporary files; default: beside --output")
    sub.add_argument("--seed", type=int, default=0, help="seed of pairs, lengths and labels")
    sub.add_argument(
        "--runner", default="local", metavar="RUNNER",
        help="local, or an Apache Beam runner: DirectRunner, DataflowRunner, FlinkRunner, SparkRunner, ...; its "
        "options follow `--` at the end of the command",
    )  # fmt: skip
    add_json(sub)

    sub = command("inspect", "Show counts, lengths, padding and instances of a prepared dataset.")
    sub.add_argument("data", metavar="DIR", help="a prepared dataset")
    sub.add_argument("--samples", type=int, default=3, help="instances to show")
    sub.add_argument("--seed", type=int, default=0, help="seed of the sampled instances and their masks")
    add_json(sub)

    sub = command("pretrain", "Pre-train with MLM and NSP; run it again to resume.")
    spec = "NAME|FILE.py[:ARG]"
    add_config(sub, "--config", spec, "a config; --config.KEY=VALUE overrides its keys", required=True)
    sub.add_argument("--workdir", metavar="DIR", help="folder of checkpoints, metrics and curves; required to train")
    sub.add_argument(
        "--dry_run", action="store_true",
        help="start nothing and write nothing: print sizes, FLOPs, tokens, memory, hours and checkpoints of the run",
    )  # fmt: skip
    sub.add_argument("--device", metavar="NAME", help="dry_run: the device, such as v5e or h100; default: this one")
    sub.add_argument("--devices", type=int, metavar="N", help="dry_run: number of devices; default: those here, or 1")
    sub.add_argument(
        "--mfu", type=float, metavar="SHARE", help="dry_run: model FLOPs utilization, for the hours; default: 1.0"
    )
    add_json(sub)

    sub = command(
        "evaluate", "Print JSON: loss and accuracy on a dataset's eval split, or a fine-tuned model's scores on files."
    )
    add_checkpoint(sub)
    sub.add_argument(
        "--data", required=True, metavar="DIR|FILE",
        help="a prepared dataset; for a fine-tuned model, a labelled file or its folder",
    )  # fmt: skip
    sub.add_argument(
        "--steps", default="", metavar="STEPS",
        help="pre-training: scores of `all` checkpoints of a workdir, or of steps such as 0,1000; default: the newest",
    )  # fmt: skip
    sub.add_argument("--batch_size", type=int, default=64, help="sequences per batch")
    add_json(sub)

    sub = command("finetune", "Fine-tune a checkpoint on a task and score it; run it again to resume.")
    text = "finetune/glue:sst2, finetune/text, or a file; --config.KEY=VALUE overrides its keys"
    add_config(sub, "--config", spec, text, required=True)
    sub.add_argument("--workdir", required=True, metavar="DIR", help="checkpoints, metrics, scores and predictions")
    add_strict(sub)
    add_json(sub)

    sub = command("predict", "Write a fine-tuned model's predictions for a file, for any kind of task.")
    add_checkpoint(sub)
    sub.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help="a file in the format of the training file, labels ignored; a tagger also reads one sentence per line",
    )
    sub.add_argument(
        "--output", required=True, metavar="FILE",
        help="JSON lines with id, prediction and scores; a table if it ends in .csv or .tsv",
    )  # fmt: skip
    sub.add_argument("--with_text", action="store_true", help="write the texts of each row, too")
    sub.add_argument(
        "--text", nargs="+", default=(), metavar="COLUMN",
        help="one or two text columns; default: those of the training file",
    )  # fmt: skip
    add_strict(sub)
    sub.add_argument("--batch_size", type=int, default=64, help="texts per batch")
    add_json(sub)

    sub = command("study", "Pre-train and fine-tune every row of a table; run it again to resume.")
    add_config(
        sub, "config", spec,
        "studies/table5, or a file; --config.KEY=VALUE overrides its keys, --config.pretraining.KEY a key of "
        "every row's pre-training, --config.finetuning.KEY a key of every task",
    )  # fmt: skip
    sub.add_argument("--workdir", required=True, metavar="DIR", help="folder of all runs' workdirs and of the table")
    add_json(sub)

    sub = command("fill-mask", "Print the most probable words for each [MASK].")
    add_checkpoint(sub)
    sub.add_argument("--top", type=int, default=5, help="candidates per mask")
    sub.add_argument("text", nargs="+", help='for example "Paris is the [MASK] of France."')
    add_json(sub)

    sub = command("features", "Write hidden states of a text file: of each token, or one vector per line.")
    add_checkpoint(sub)
    sub.add_argument(
        "--input", required=True, metavar="FILE", help="one text per line, or two: `first ||| second`; also compressed"
    )
    sub.add_argument("--output", required=True, metavar="FILE", help="JSON lines, or arrays if it ends in .npz")
    sub.add_argument(
        "--layers", metavar="LAYERS",
        help="numbers (0 is the first, -1 the last) or names: embeddings, first, second_to_last, last, last_four, all; "
        "default: the last four, with --pool the last",
    )  # fmt: skip
    sub.add_argument(
        "--pool", choices=["mean", "cls"],
        help="write one vector per line: the mean over all tokens, [CLS] and [SEP] included, or that of [CLS]",
    )  # fmt: skip
    sub.add_argument("--seq_len", type=int, help="maximum tokens per line; default: the model's maximum")
    sub.add_argument("--batch_size", type=int, default=32, help="lines per batch")
    add_json(sub)

    sub = command("export", "Write a checkpoint for Hugging Face transformers and its Hub, or as StableHLO.")
    add_checkpoint(sub)
    sub.add_argument("--output", required=True, metavar="DIR", help="a new folder; with --steps, of a folder per step")
    sub.add_argument(
        "--steps", default="", metavar="STEPS",
        help="hf: write DIR/stepN for `all` checkpoints of a workdir, or for steps such as 0,1000; skips complete ones",
    )  # fmt: skip
    sub.add_argument("--format", choices=["hf", "stablehlo"], default="hf", help="of the folder")
    sub.add_argument("--license", default="", metavar="ID", help="hf: license in the model card, such as apache-2.0")
    sub.add_argument("--language", nargs="+", default=(), metavar="CODE", help="hf: languages in the card, such as en")
    sub.add_argument("--datasets", nargs="+", default=(), metavar="NAME", help="hf: data sets on the Hub in the card")
    add_json(sub)

    sub = command("import", "Import a checkpoint from another library's format, to evaluate, train or export it.")
    sub.add_argument(
        "--source", required=True, metavar="DIR|FILE",
        help="a transformers folder: config.json, weights, and vocab.txt or tokenizer.json; or a file of weights in "
        "one; or a TensorFlow checkpoint (its folder, or such as DIR/bert_model.ckpt) beside bert_config.json and "
        "vocab.txt",
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
    sub.add_argument(
        "--layers", type=_numbers, metavar="LAYERS",
        help="import these layers alone, from 0 and in this order, such as 0,2,4; a layer may be repeated",
    )  # fmt: skip
    sub.add_argument(
        "--drop", nargs="+", default=(), metavar="NAME",
        help="beginnings of the names of weights that are not imported; any other unused weight is refused",
    )  # fmt: skip
    add_json(sub)

    sub = command("compile", "Compile a config's training step ahead of time: memory, collectives, estimated time.")
    add_config(sub, "--config", spec, "a config of pretrain; data.path may be empty", required=True)
    sub.add_argument(
        "--topology", metavar="CHIP:A[xB[xC]]",
        help="a slice of TPUs, such as v5e:4x4 or v5p:2x2x2; default: the devices of this machine",
    )  # fmt: skip
    sub.add_argument("--num_slices", type=int, default=1, help="slices, connected by a slower network")
    sub.add_argument("--phase", type=int, default=None, help="compile one phase, numbered from 0; default: all")
    sub.add_argument(
        "--profile", action="store_true", help="list the forty largest parts of a step's time by XLA's cost model"
    )
    add_json(sub)

    sub = command("report", "Report on one run, or on several side by side: curves, scores, configs.")
    sub.add_argument(
        "workdir", nargs="+", metavar="RUN",
        help="a workdir of pretrain, finetune or study, or a folder of workdirs",
    )  # fmt: skip
    sub.add_argument("--output", required=True, metavar="FILE", help="a .html, which works offline")
    add_json(sub)

    sub = command("configs", "List the packaged configs, or print the keys of one with values and comments.")
    add_config(sub, "config", spec, "a config; without it, all are listed", nargs="?")
    sub.configs = ""
    add_json(sub)

    sub = command("completion", "Print the script that completes commands in a shell.")
    sub.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    return result, commands.choices
