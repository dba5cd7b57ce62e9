"""Pages of the documentation: their code blocks, and the folder and the program in which tests run them.

As a program it runs one `bert-jax` command with settings for seconds on a CPU.
"""

import contextlib
import csv
import dataclasses
import gzip
import itertools
import json
import random
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from support import helpers, squad_examples

from bert_jax import cli, config
from bert_jax.config import FinetuneConfig, PretrainConfig, StudyConfig
from bert_jax.sections import flatten, with_values

# --- Pages -------------------------------------------------------------------------------------------------------

DOCS = helpers.REPOSITORY / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if not {"_build", "_generated"} & set(path.relative_to(DOCS).parts))
OTHER_PAGES = [helpers.REPOSITORY / "README.md", helpers.REPOSITORY / "launch" / "README.md"]
_BLOCK = re.compile(r"(?:^ *(<!--.*-->)\n)?^( *)(`{3,})(\S*).*\n((?:.*\n)*?)^\2\3`* *$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
      line: number of the fence's line, from 1.
      language: the first word after the fence; "" for none. Directives are in braces: {toctree}.
      above: the line above the fence, if it is an HTML comment.
    """

    page: Path
    line: int
    language: str
    text: str
    above: str

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"

    @property
    def is_run(self) -> bool:
        """True if the tests run the block."""
        return self.language in ("bash", "python", "{code-cell}") and not self.above

    @property
    def shell(self) -> str:
        """The shell commands in it: all of a bash block, or those of a notebook's cell; "" for others."""
        if self.language == "{code-cell}" and re.match(r"%%bash\n|!", self.text):
            return re.sub(r"^(%%bash\n|!)", "", self.text)
        return self.text if self.language == "bash" else ""


def name(page: Path) -> str:
    return str(page.relative_to(helpers.REPOSITORY))


def read_blocks(page: Path) -> Iterator[Block]:
    """Yields the fenced blocks of a page."""
    source = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(source):
        text = re.sub(f"^{found[2]}", "", found[5], flags=re.MULTILINE)
        yield Block(page, source[: found.start(3)].count("\n") + 1, found[4], text, found[1] or "")


def commands(shell: str) -> list[list[str]]:
    """Returns the words of each `bert-jax` command in shell code, without `bert-jax` and up to the next operator."""
    found, pending = [], ""
    for line in shell.replace("\\\n", " ").splitlines():
        pending += re.sub(r"(?<=\s)\d(?=>)", "", line) + "\n"  # without the descriptor of `2>`
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        with contextlib.suppress(ValueError):  # a quote that the next line closes
            words, pending = list(lexer), ""
            parts = [list(part) for _, part in itertools.groupby(words, lambda word: set(word) <= set("();<>|&"))]
            for part in parts:
                names = [Path(word).name for word in part]
                found += [part[names.index("bert-jax") + 1 :]] if "bert-jax" in names else []
    return [words for words in found if words]  # `pip install bert-jax` is none


def check(words: Sequence[str]) -> None:
    """Parses a command, and loads its config with the overrides; of a config that is elsewhere, the overrides alone."""
    if "..." in words or "--help" in words or "--version" in words:
        return
    options = cli.parse(words)
    kind = {"pretrain": PretrainConfig, "compile": PretrainConfig, "finetune": FinetuneConfig, "study": StudyConfig}
    if words[0] in kind:
        path = helpers.REPOSITORY / options.config.partition(":")[0]
        if path.suffix == ".py" and not path.exists():
            with_values(kind[words[0]](), dict(options.overrides))
        else:
            config.load_config(options.config, options.overrides, kind=kind[words[0]])


# --- Commands in small -------------------------------------------------------------------------------------------

_MESH = {"mesh.data": -1, "mesh.fsdp": 1, "mesh.tensor": 1}
PRETRAIN = {
    "model.hidden_size": 32, "model.num_hidden_layers": 4, "model.num_attention_heads": 2,
    "model.intermediate_size": 64, "model.max_position_embeddings": 64, "model.vocab_size": -1, **_MESH,
    "total_steps": 4, "global_batch_size": 8, "gradient_accumulation": 1,
    "optimizer.warmup_steps": 1, "log_every_steps": 1, "eval_every_steps": 4, "eval_batches": 1,
    "checkpoint.every_steps": 2, "data.seq_len": -1, "data.max_predictions": -1,
}  # fmt: skip
FINETUNE = {
    "num_epochs": 1, "global_batch_size": 8, "gradient_accumulation": 1, "eval_batch_size": 8, "log_every_steps": 1,
    "task.max_seq_len": 64, "task.doc_stride": 16, "task.max_query_length": 16, "task.max_answer_length": 8, **_MESH,
}  # fmt: skip
SEQ_LEN = {"128": "32", "512": "64"}
"""Tokens per sequence of prepared datasets: what pages say, and what the tests make."""


def shrink(full: Any) -> Any:
    """Returns a config with few steps of a tiny model; every phase has as many, so that one may be added."""
    if isinstance(full, StudyConfig):
        finetuning = {**full.finetuning, **FINETUNE, "search.learning_rates": (1e-3,), "search.seeds": (0, 1)}
        rows = (full.only_rows or tuple(row.name for row in full.rows))[:2]
        return dataclasses.replace(
            full, pretraining=shrink(full.pretraining), finetuning=finetuning, only_rows=rows, only_tasks=("SST-2",)
        )
    if isinstance(full, FinetuneConfig):
        searched = {key: value[:2] for key, value in flatten(full) if key in ("search.learning_rates", "search.seeds")}
        return with_values(full, {**FINETUNE, **searched, **({"head.bilstm": 4} if full.head.bilstm else {})})
    values = {key: value for key, value in PRETRAIN.items() if full.model.hidden_size != -1 or key[:6] != "model."}
    phases = [{key: PRETRAIN.get(key, value) for key, value in phase.items()} | {"steps": 4} for phase in full.phases]
    values |= {"phases": phases, "total_steps": 4 * max(1, len(phases))}
    return with_values(full, {**values, "checkpoint.milestones": (0, 1) if full.checkpoint.milestones else ()})


def run(words: list[str]) -> int:
    """Runs a command in small and returns its exit status; compiles for no TPU."""
    if words[:1] == ["compile"] and any(word.startswith("--topology") for word in words):
        return 0
    if words[:1] == ["prepare"] and "--seq_len" not in words:
        words = ["prepare", "--seq_len", "128", *words[1:]]
    for at in range(1, len(words)):
        words[at] = SEQ_LEN.get(words[at], words[at]) if words[at - 1] == "--seq_len" else words[at]
    load = config.load_config
    if words[:1] == ["check"]:  # its own config is small
        return cli.main(words)
    with mock.patch.object(config, "load_config", lambda *given, **options: shrink(load(*given, **options))):
        return cli.main(words)


def write_program(folder: Path) -> None:
    """Writes `bert-jax` into a folder, for the PATH of a shell: a program that runs commands in small."""
    folder.mkdir()
    (folder / "bert-jax").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m support.docs "$@"\n')
    (folder / "bert-jax").chmod(0o755)


# --- The folder that pages start from ----------------------------------------------------------------------------

_TEXTS = "--input text wiki"
COMMANDS = {
    "tokenizer.json": f"vocab {_TEXTS} --output tokenizer.json",
    "data": f"prepare {_TEXTS} --vocab tokenizer.json --output data",
    "data128": f"prepare {_TEXTS} --vocab tokenizer.json --output data128",
    "data512": f"prepare {_TEXTS} --vocab tokenizer.json --output data512 --seq_len 512",
    "runs/base": "pretrain --config=bert_base --workdir=runs/base --config.data.path=data "
    "--config.checkpoint.milestones=0",
    "runs/mine": "finetune --config=finetune/text --workdir=runs/mine --config.init=runs/base "
    "--config.task.train=train.csv --config.task.dev=dev.csv",
    "features.npz": "features --checkpoint=runs/base --input=lines.txt --output=features.npz",
    "hf": "export --checkpoint=runs/base --output=hf",
    "imported": "import --source=hf --output=imported",
}
"""Items of the folder, and the commands that make them, in order."""


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns sentences of the synthetic language, each with its topic."""
    rng = random.Random(seed)
    found = []
    for topic in rng.choices(["sea", "wood"], k=count):
        first, second = rng.sample(helpers.TOPICS[topic], 2)
        found.append((f"the {first} {rng.choice(helpers.VERBS)} the {second} .", topic))
    return found


def write_rows(path: str, columns: Iterable[str], rows: Iterable[Iterable[object]], delimiter: str = ",") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([columns, *rows])


def write_folder(folder: Path) -> None:
    """Writes corpora, files of tasks, and the items of `COMMANDS` with the names that pages use."""
    with contextlib.chdir(folder):
        for place in ("text", "domain", "wiki", "parquet/20231101.en", "squad", "conll2003"):
            Path(place).mkdir(parents=True)
        for number in range(2):
            text = helpers.make_corpus(documents=80, seed=number)
            Path(f"text/{number}.txt").write_text(text)
            table = pa.table({"text": text.strip().split("\n\n")})
            pq.write_table(table, f"parquet/20231101.en/train-0000{number}-of-00002.parquet")
        Path("parquet/README.md").write_text("---\nlicense: cc-by-sa-3.0\n---\nThe card.\n")
        # words that the vocabulary of the other texts splits
        Path("domain/0.txt").write_text(helpers.make_corpus(documents=80, seed=5).replace("the ship ", "the shipleaf "))
        with gzip.open("wiki/00.jsonl.gz", "wt") as file:
            for text in helpers.make_corpus(documents=40, seed=2).strip().split("\n\n"):
                file.write(json.dumps({"title": "A page", "text": text}) + "\n")
        _write_tasks()
        for command in COMMANDS.values():
            assert run(command.split()) == 0, command


def _write_tasks() -> None:
    texts = [text for text, _ in sentences(5, 4)]
    Path("lines.txt").write_text("\n".join([*texts, f"{texts[0]} ||| {texts[1]}"]) + "\n")
    for split, count, seed in (("train", 32, 1), ("dev", 12, 2), ("new", 6, 3)):
        write_rows(f"{split}.csv", ["text", "label"], sentences(count, seed))
    for place in ("glue/SST-2", "tasks/glue/SST-2"):
        for split, count in (("train", 24), ("dev", 8)):
            rows = [(text, int(topic == "sea")) for text, topic in sentences(count, count)]
            write_rows(f"{place}/{split}.tsv", ["sentence", "label"], rows, "\t")
        write_rows(f"{place}/test.tsv", ["index", "sentence"], enumerate(text for text, _ in sentences(6, 6)), "\t")
    context = " ".join(text for text, _ in sentences(6, 5))
    answers = re.findall(r"[a-z]{4,}", context)[:8]
    for split, version in itertools.product(("train", "dev"), ("1.1", "2.0")):
        more = {"is_impossible": False} if version == "2.0" else {}
        entries = [
            squad_examples.entry(f"{split}{number}", answer, context.index(answer), **more)
            for number, answer in enumerate(answers)
        ]
        if more:
            entries.append(squad_examples.entry(f"{split}-none", None, is_impossible=True))
        squad_examples.write(Path(f"squad/{split}-v{version}.json"), context, *entries)
    for split, count in (("eng.train", 24), ("eng.testa", 8), ("eng.testb", 8)):
        words = [[word, "NN", "I-NP", "I-LOC" if word in helpers.TOPICS["sea"] else "O"]
                 for text, _ in sentences(count, count) for word in [*text.split(), ""]]  # fmt: skip
        lines = "".join(f"{' '.join(word) if word[0] else ''}\n" for word in words)
        Path(f"conll2003/{split}").write_text(f"-DOCSTART- -X- -X- O\n\n{lines}")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
