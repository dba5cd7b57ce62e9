"""Prepared folder of the documentation's commands: the files that pages start from, made when a page names them."""

import contextlib
import csv
import functools
import gzip
import json
import random
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from support import doc_commands, helpers, squad_examples
from support.doc_pages import Block

from bert_jax import cli

TESTS = helpers.REPOSITORY / "tests"


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns sentences of the synthetic language, each with its topic."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        topic = rng.choice(["sea", "wood"])
        first, second = rng.sample(helpers.TOPICS[topic], 2)
        found.append((f"the {first} {rng.choice(helpers.VERBS)} the {second} .", topic))
    return found


def is_read(item: str, text: str) -> bool:
    """Returns True if commands read an item, or write it after they have read it: if they do not make it first."""
    first = re.search(rf"(--output[= ]|--workdir[= ])?(?<![\w./-]){re.escape(item)}(?![\w-])", text)
    return first is not None and first[1] is None


def write_rows(path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]], delimiter: str = ",") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL)
        writer.writerow(columns)
        writer.writerows(rows)


_TEXTS = "--input text/*.txt wiki/*.jsonl.gz"
COMMANDS = {
    "tokenizer.json": f"vocab {_TEXTS} --output tokenizer.json",
    "data": f"prepare {_TEXTS} --vocab tokenizer.json --output data --seq_len 128",
    "data128": f"prepare {_TEXTS} --vocab tokenizer.json --output data128 --seq_len 128",
    "data512": f"prepare {_TEXTS} --vocab tokenizer.json --output data512 --seq_len 512",
    "runs/base": "pretrain --config=bert_base --workdir=runs/base --config.data.path=data",
    "runs/mine": "finetune --config=finetune/text --workdir=runs/mine --config.init=runs/base "
    "--config.task.train=train.csv --config.task.dev=dev.csv",
    "features.npz": "features --checkpoint runs/base --input lines.txt --output features.npz",
    "hf": "export --checkpoint runs/base --output hf",
    "imported": "import --source hf --output imported",
}
"""Commands of the pages that make an item."""
NEEDS = {
    "tokenizer.json": ("text", "wiki"), "data": ("tokenizer.json",), "data128": ("tokenizer.json",),
    "data512": ("tokenizer.json",), "runs/base": ("data",), "runs/mine": ("runs/base", "train.csv", "dev.csv"),
    "features.npz": ("runs/base", "lines.txt"), "hf": ("runs/base",), "imported": ("hf",),
}  # fmt: skip


class Store:
    """Makes and keeps the items that pages start from, each once, with the commands of the pages themselves."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._made: set[str] = set()
        self._makers: dict[str, Callable[[], None]] = {
            "text": self._text,
            "domain": self._domain,
            "wiki": self._wiki,
            "parquet": self._parquet,
            "lines.txt": self._lines,
            "train.csv": lambda: self._table("train.csv", 32, 1),
            "dev.csv": lambda: self._table("dev.csv", 12, 2),
            "new.csv": lambda: self._table("new.csv", 6, 3),
            "glue": lambda: self._sst2("glue"),
            "tasks": lambda: self._sst2("tasks/glue"),
            "squad": self._squad,
            "conll2003": self._conll,
            **{item: functools.partial(self._run, words) for item, words in COMMANDS.items()},
        }

    def copy(self, blocks: Iterable[Block], folder: Path) -> set[str]:
        """Copies to `folder` the items that the blocks name, and what they depend on; returns their names."""
        text = "\n".join(block.text for block in blocks)
        named = [item for item in self._makers if is_read(item, text)]
        copied: set[str] = set()
        for item in named:
            self._make(item)
            self._copy(item, folder, copied)
        for name in ("launch", "benchmarks", "configs"):
            (folder / name).symlink_to(helpers.REPOSITORY / name)
        return copied

    def _copy(self, item: str, folder: Path, copied: set[str]) -> None:
        for needed in NEEDS.get(item, ()):
            self._copy(needed, folder, copied)
        if item in copied:
            return
        copied.add(item)
        source = self.folder / item
        if source.is_dir():
            shutil.copytree(source, folder / item)
            return
        for path in source.parent.glob(f"{source.name}*"):  # a vocabulary has a record beside it
            (folder / item).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / item.replace(source.name, path.name))

    def _make(self, item: str) -> None:
        if item in self._made:
            return
        for other in NEEDS.get(item, ()):
            self._make(other)
        self._makers[item]()
        self._made.add(item)

    def _run(self, command: str) -> None:
        with contextlib.chdir(self.folder):
            assert cli.main(doc_commands.cheap(command.split())) == 0, command

    def _text(self) -> None:
        (self.folder / "text").mkdir()
        for number in range(2):
            (self.folder / "text" / f"{number}.txt").write_text(helpers.make_corpus(documents=80, seed=number))

    def _domain(self) -> None:
        """Writes texts with words that the vocabulary of the other texts splits."""
        (self.folder / "domain").mkdir()
        text = helpers.make_corpus(documents=80, seed=5).replace("the ship ", "the shipleaf ")
        (self.folder / "domain" / "0.txt").write_text(text)

    def _wiki(self) -> None:
        (self.folder / "wiki").mkdir()
        documents = helpers.make_corpus(documents=40, seed=2).strip().split("\n\n")
        with gzip.open(self.folder / "wiki" / "00.jsonl.gz", "wt") as file:
            for number, text in enumerate(documents):
                file.write(json.dumps({"id": str(number), "title": f"Page {number}", "text": text}) + "\n")

    def _parquet(self) -> None:
        """Writes a dataset as the Hub has it: a folder of Parquet files, below that of its card."""
        folder = self.folder / "parquet" / "20231101.en"
        folder.mkdir(parents=True)
        (folder.parent / "README.md").write_text("---\nlicense: cc-by-sa-3.0\n---\nThe card.\n")
        for number in range(2):
            documents = helpers.make_corpus(documents=80, seed=number).strip().split("\n\n")
            columns = {"id": [str(index) for index in range(len(documents))], "text": documents}
            pq.write_table(pa.table(columns), folder / f"train-0000{number}-of-00002.parquet")

    def _lines(self) -> None:
        texts = [text for text, _ in sentences(5, 4)]
        (self.folder / "lines.txt").write_text("\n".join([*texts, f"{texts[0]} ||| {texts[1]}"]) + "\n")

    def _table(self, name: str, count: int, seed: int) -> None:
        write_rows(self.folder / name, ["text", "label"], sentences(count, seed))

    def _sst2(self, place: str) -> None:
        folder = self.folder / place / "SST-2"
        for split, count in (("train", 24), ("dev", 8)):
            rows = [(text, int(topic == "sea")) for text, topic in sentences(count, count)]
            write_rows(folder / f"{split}.tsv", ["sentence", "label"], rows, "\t")
        write_rows(
            folder / "test.tsv", ["index", "sentence"], enumerate(text for text, _ in sentences(6, 6)), "\t"
        )  # fmt: skip

    def _squad(self) -> None:
        context = " ".join(text for text, _ in sentences(6, 5))
        answers = re.findall(r"[a-z]{4,}", context)[:8]
        (self.folder / "squad").mkdir()
        for version, names in (("1.1", answers), ("2.0", [*answers, None])):
            for split in ("train", "dev"):
                entries = [
                    squad_examples.entry(
                        f"{split}{number}", answer, context.index(answer) if answer else 0,
                        **({"is_impossible": answer is None} if version == "2.0" else {}),
                    )
                    for number, answer in enumerate(names)
                ]  # fmt: skip
                squad_examples.write(self.folder / "squad" / f"{split}-v{version}.json", context, *entries)

    def _conll(self) -> None:
        (self.folder / "conll2003").mkdir()
        for name, count in (("eng.train", 24), ("eng.testa", 8), ("eng.testb", 8)):
            parts = ["-DOCSTART- -X- -X- O\n"]
            for text, _ in sentences(count, count):
                words = text.split()
                tags = ["I-LOC" if word in helpers.TOPICS["sea"] else "O" for word in words]
                parts.append("".join(f"{word} NN I-NP {tag}\n" for word, tag in zip(words, tags, strict=True)))
            (self.folder / "conll2003" / name).write_text("\n".join(parts))
