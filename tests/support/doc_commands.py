"""Commands of the documentation: found in shell code, parsed, and made cheap enough for a test.

As a program it runs one `bert-jax` command with settings for seconds on a CPU: `doc_commands.py pretrain --config=...`.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax import cli
from bert_jax.config import FinetuneConfig, load_config
from bert_jax.config_listing import type_of
from bert_jax.errors import InputError
from bert_jax.sections import flatten

KEYS_OF = {"pretrain": "default", "compile": "default", "finetune": "finetune/default", "study": "studies/default"}

_MODEL = {
    "model.hidden_size": 32, "model.num_hidden_layers": 4, "model.num_attention_heads": 2,
    "model.intermediate_size": 64, "model.max_position_embeddings": 64, "model.vocab_size": -1,
}  # fmt: skip
_MESH = {"mesh.data": -1, "mesh.fsdp": 1, "mesh.tensor": 1}
PHASE_STEPS = 4
"""Steps of a run, or of each of its phases: a phase may be added to a finished run."""
PRETRAIN = {
    **_MODEL, **_MESH, "total_steps": PHASE_STEPS, "global_batch_size": 8, "gradient_accumulation": 1,
    "optimizer.warmup_steps": 1, "log_every_steps": 1, "eval_every_steps": 4, "eval_batches": 1,
    "checkpoint.every_steps": 2, "data.seq_len": -1, "data.max_predictions": -1,
}  # fmt: skip
FINETUNE = {
    "num_epochs": 1, "global_batch_size": 8, "gradient_accumulation": 1, "eval_batch_size": 8, "log_every_steps": 1,
    "task.max_seq_len": 64, "task.doc_stride": 16, "task.max_query_length": 16, "task.max_answer_length": 8,
    "head.bilstm": 4, **_MESH,
}  # fmt: skip
STUDY = {"only_tasks": ("SST-2",)}
SEQ_LEN = {"128": "32", "512": "64"}
"""Tokens per sequence of prepared datasets: what pages say, and what the tests make."""

_FINETUNING = "finetuning."
SPLITS = set("();<>|&\n")


def commands(shell: str) -> list[list[str]]:
    """Returns the words of each `bert-jax` command in shell code, without `bert-jax` and up to the next operator."""
    joined = without_comments(shell).replace("\\\n", " ")
    joined = re.sub(r"(?<=\s)\d(?=>)", "", joined)  # the descriptor of `2>`
    lexer = shlex.shlex(joined, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    found: list[list[str]] = []
    current: list[str] | None = None
    for word in lexer:
        if set(word) <= SPLITS:
            current = None
        elif current is not None:
            current.append(word)
        elif Path(word).name == "bert-jax":
            current = []
            found.append(current)
    return [words for words in found if words]  # `pip install bert-jax` is none


def without_comments(shell: str) -> str:
    """Removes comments: from a # after white space to the end of the line, except in quotes."""
    kept, quote, before = [], "", "\n"
    comment = False
    for letter in shell:
        if comment:
            comment = letter != "\n"
        elif quote:
            quote = "" if letter == quote and before != "\\" else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and before.isspace():
            comment = True
        if not comment:
            kept.append(letter)
        before = letter
    return "".join(kept)


def accepts(words: Sequence[str], folder: Path | None = None) -> bool:
    """Parses a command, and loads its config with the overrides; a config file of one's own only if it is in `folder`.

    Returns False, with the reason on stderr, for a command that the command line refuses.
    """
    try:
        _load(words, folder)
    except SystemExit as ended:
        return not ended.code
    except InputError as error:
        print(error, file=sys.stderr)
        return False
    return True


def _load(words: Sequence[str], folder: Path | None) -> None:
    if "..." in words:  # a command that the page leaves open
        cli.parse([words[0], "--help"] if words[0] != "..." else ["--help"])
        return
    options = cli.parse(words)
    if words[0] not in KEYS_OF:
        return
    path = options.config.partition(":")[0]
    is_elsewhere = path.endswith(".py") and not ((folder or Path()) / path).exists()
    read_config(words[0], KEYS_OF[words[0]] if is_elsewhere else options.config, options.overrides)


def read_config(command: str, config: str, pairs: Sequence[tuple[str, str]]) -> Any:
    """Loads a command's config with overrides; those of a study's fine-tuning are checked and dropped."""
    if command == "study":
        finetuning = [(key.removeprefix(_FINETUNING), text) for key, text in pairs if key.startswith(_FINETUNING)]
        load_config("finetune/default", finetuning, kind=FinetuneConfig)
        pairs = [(key, text) for key, text in pairs if not key.startswith(_FINETUNING)]
    return load_config(config, pairs, kind=type_of(KEYS_OF[command]))


def cheap(words: Sequence[str]) -> list[str]:
    """Returns a command with few steps of a tiny model added, and with short sequences."""
    words = list(words)
    if not words or words[0].startswith("-") or "--help" in words:
        return words
    if words[0] == "prepare":
        if "--seq_len" not in words:
            words[1:1] = ["--seq_len", "128"]
        at = words.index("--seq_len") + 1
        words[at] = SEQ_LEN.get(words[at], words[at])
    if words[0] == "features" and "--seq_len" in words:
        at = words.index("--seq_len") + 1
        words[at] = SEQ_LEN.get(words[at], words[at])
    if words[0] in KEYS_OF:
        options = cli.parse(words)
        config = read_config(words[0], options.config, options.overrides)
        words += [f"--config.{key}={value}" for key, value in overrides(words[0], config).items()]
    return words


def overrides(command: str, config: Any) -> dict[str, object]:
    if command in ("pretrain", "compile"):
        return _pretraining(config)
    if command == "finetune":
        return _finetuning(config)
    if command == "study":
        pretraining = {f"pretraining.{key}": value for key, value in _pretraining(config.pretraining).items()}
        finetuning = {
            f"finetuning.{key}": value for key, value in FINETUNE.items() if not key.startswith("head.")
        } | {"finetuning.search.learning_rates": (1e-3,), "finetuning.search.seeds": (0, 1)}  # fmt: skip
        names = tuple(row["name"] if isinstance(row, dict) else row.name for row in config.rows)
        rows = config.only_rows or names
        return {**STUDY, **pretraining, **finetuning, "only_rows": tuple(rows)[:2]}
    return {}


def _pretraining(config: Any) -> dict[str, object]:
    chosen: dict[str, object] = dict(PRETRAIN)
    if config.model.hidden_size == -1:  # the sizes of a checkpoint
        chosen = {key: value for key, value in chosen.items() if not key.startswith("model.")}
    for number, phase in enumerate(config.phases):
        last = number == len(config.phases) - 1
        chosen[f"phases.{number}.steps"] = -1 if last else PHASE_STEPS
        chosen |= {f"phases.{number}.{key}": PRETRAIN[key] for key in phase if key in PRETRAIN}
    chosen["total_steps"] = PHASE_STEPS * max(1, len(config.phases))
    if config.checkpoint.milestones:
        chosen["checkpoint.milestones"] = (0, 1)
    return chosen


def _finetuning(config: Any) -> dict[str, object]:
    now = dict(flatten(config))
    chosen = {key: value for key, value in FINETUNE.items() if not key.startswith("head.") or now[key]}
    for key in ("search.learning_rates", "search.seeds"):
        if now[key]:
            chosen[key] = tuple(now[key])[:2]
    return chosen


def main() -> int:
    """Runs the command in `sys.argv`, made cheap."""
    return cli.main(cheap(sys.argv[1:]))


def write_program(folder: Path, tests: Path) -> None:
    """Writes `bert-jax` into a folder, for the PATH of a shell: a program that runs commands made cheap."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "bert-jax"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{tests}" exec "{sys.executable}" -m support.doc_commands "$@"\n')
    program.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
