"""Flips random bits in every kind of file that bert_jax writes, and runs the reader of the file.

    python benchmarks/flips.py [--flips 300] [--folder runs/flips] [--kinds "dataset: shards" ...] [--seconds 3600]

A flip is noticed if the reader refuses the file, or warns and uses something else: an earlier checkpoint, or no value.
It is without effect if what was read equals, bit by bit, what is read without the flip. All others are silent: the
reader returned something else, and said nothing. A message has to name the file, or the folder of the checkpoint.

Each flip is a line of FOLDER/flips.jsonl. The same command continues until each kind has `--flips`, or for `--seconds`.
Lines of other code are not counted. Ends with status 1 after a silent flip in a format with digests, an error that is
not one line, or a message without the file's name.
"""

import argparse
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=1")

from killed import cases
from record import Record, add_json_argument, code_digest

MEASURES = ("bert_jax",)
COLUMNS = {
    "file": "{kind}",
    "flips": "{flips}",
    "noticed": "{noticed}",
    "without effect": "{harmless}",
    "silent": "{silent}",
    "tracebacks": "{tracebacks}",
    "file not named": "{unnamed}",
}
NOTICED, HARMLESS, SILENT, TRACEBACK, UNNAMED = "noticed", "harmless", "silent", "traceback", "unnamed"


def main() -> int:
    options = _parser().parse_args()
    folder, code = options.folder.resolve(), code_digest(MEASURES)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["BERT_JAX_CACHE"] = str(folder / "cache")
    _make_outputs(folder / "inputs")
    from flipped import kinds as flipped

    flipped.make_inputs(folder / "inputs", folder / f"files-{code}")
    journal, record = folder / "flips.jsonl", Record(options.json, MEASURES)
    done = [flip for flip in _read(journal) if flip["code"] == code]
    chosen = options.kinds or list(flipped.KINDS)
    expected: dict[str, str] = {}
    end = time.monotonic() + options.seconds
    with journal.open("a", encoding="utf-8") as file:
        for number in range(options.flips):
            for name in chosen:
                if time.monotonic() > end or sum(flip["kind"] == name for flip in done) > number:
                    continue
                flip = flip_once(flipped.KINDS[name], name, number, folder / f"files-{code}", folder / "copy", expected)
                done.append({**flip, "code": code})
                file.write(json.dumps(done[-1]) + "\n")
                file.flush()
                if flip["verdict"] not in (NOTICED, HARMLESS):
                    print(json.dumps(flip), flush=True)
    _write(record, done, flipped.KINDS)
    print(record.render("flips"))
    return int(any(row["wrong"] for row in record.content["tables"]["flips"]["rows"]))


def flip_once(kind: Any, name: str, number: int, inputs: Path, copy: Path, expected: dict[str, str]) -> dict[str, Any]:
    """Flips a bit in a copy of the kind's folder, and reads it; returns what happened.

    `expected` holds the digests of what is read without a flip, by kind and file.
    """
    from flipped.kinds import files_of

    rng = random.Random(f"{name} {number}")
    files = files_of(kind, inputs)
    sizes = [(inputs / kind.folder / file).stat().st_size for file in files]
    file = rng.choices(files, sizes)[0] if number % 2 else rng.choice(files)
    key = f"{name} {file}"
    if key not in expected:
        place = _copied(inputs / kind.folder, copy)
        expected[key] = kind.read(place, place / file)
    place = _copied(inputs / kind.folder, copy)
    content = bytearray((place / file).read_bytes())
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    (place / file).unlink()  # a link to the original
    (place / file).write_bytes(content)
    log = _Log()
    logging.getLogger("bert_jax").addHandler(log)
    error = ""
    try:
        is_equal = kind.read(place, place / file) == expected[key]
        verdict = HARMLESS if is_equal else SILENT
        said = "\n".join(log.lines)
        if said and not is_equal:
            verdict = NOTICED
    except Exception as caught:
        from bert_jax.errors import BertJaxError

        said = error = str(caught)
        verdict = NOTICED if isinstance(caught, BertJaxError) and "\n" not in said else TRACEBACK
        if verdict == TRACEBACK:
            error = f"{type(caught).__name__}: {error}"
    finally:
        logging.getLogger("bert_jax").removeHandler(log)
    if verdict == NOTICED and (kind.names or file.name) not in said:
        verdict = UNNAMED
    return {
        "kind": name, "number": number, "file": file.as_posix(), "byte": at, "bit": bit, "verdict": verdict,
        "said": (error or said)[:400],
    }  # fmt: skip


class _Log(logging.Handler):
    """Collects warnings and errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _copied(folder: Path, copy: Path) -> Path:
    """Makes a copy of links to the files of a folder; returns its path."""
    shutil.rmtree(copy, ignore_errors=True)
    place = copy / folder.name
    shutil.copytree(folder, place, copy_function=os.link)
    return place


def _make_outputs(folder: Path) -> None:
    """Runs the commands whose outputs are damaged; does nothing if an earlier campaign has run them."""
    environment = dict(os.environ)
    cases.make_inputs(folder, environment)
    if not (folder / "studied").exists():
        words = ["study", str(folder / "study.py"), f"--workdir={folder / 'studying'}"]
        subprocess.run([sys.executable, "-m", "bert_jax.cli", *words], env=environment, check=True)
        (folder / "studying").rename(folder / "studied")


def _write(record: Record, done: list[dict[str, Any]], kinds: dict[str, Any]) -> None:
    rows = []
    for name, kind in kinds.items():
        verdicts = [flip["verdict"] for flip in done if flip["kind"] == name]
        if verdicts:
            silent, tracebacks, unnamed = (verdicts.count(one) for one in (SILENT, TRACEBACK, UNNAMED))
            wrong = tracebacks + unnamed + (silent if kind.has_digest else 0)
            rows.append({
                "kind": name, "flips": len(verdicts), "noticed": verdicts.count(NOTICED),
                "harmless": verdicts.count(HARMLESS), "silent": silent, "tracebacks": tracebacks, "unnamed": unnamed,
                "wrong": wrong, "has_digest": kind.has_digest,
            })  # fmt: skip
    record.set_table("flips", COLUMNS, rows)
    record.set_values(
        flips=len(done), noticed=sum(row["noticed"] for row in rows), wrong=sum(row["wrong"] for row in rows),
        silent_without_digest=sum(row["silent"] for row in rows if not row["has_digest"]),
        silent=sum(row["silent"] for row in rows if row["has_digest"]),
    )  # fmt: skip


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=300, help="of each kind of file")
    parser.add_argument("--folder", type=Path, default=Path("runs/flips"))
    parser.add_argument("--kinds", nargs="+", metavar="KIND")
    parser.add_argument("--seconds", type=float, default=7200.0, help="after which no further flip begins")
    add_json_argument(parser, "flips")
    return parser


if __name__ == "__main__":
    sys.exit(main())
