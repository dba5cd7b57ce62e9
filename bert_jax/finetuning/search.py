"""The paper's search: every learning rate, with every seed, and the best on dev.

    bert-jax finetune --config=finetune/glue:rte --workdir=runs/rte --config.init=runs/base \\
      --config.data.path=glue/RTE --config.search.learning_rates="(5e-5, 4e-5, 3e-5, 2e-5)" \\
      --config.search.seeds="(0, 1, 2, 3, 4)"

Each run has a folder of its own in the workdir and is complete by itself: a search that was killed goes on with the run
that it was at.
"""

import json
import logging
import statistics
from collections.abc import Mapping
from itertools import product
from typing import Any

from etils import epath

from bert_jax.config import ConfigDict
from bert_jax.errors import InputError
from bert_jax.files import atomic, remote
from bert_jax.finetuning.finetune import RESULT_FILE, check_same_run, finetune
from bert_jax.finetuning.task_checks import check_config
from bert_jax.progress import Bars, silent
from bert_jax.runtime.compilation_cache import shared_programs
from bert_jax.runtime.preemption import StopSignal
from bert_jax.runtime.processes import is_first, wait_for_first
from bert_jax.training.run import CONFIG_FILE

log = logging.getLogger(__name__)

SEARCH_FILE = "search.json"


def folder_of(rate: float, seed: int) -> str:
    """The name of a run's folder."""
    return f"lr-{rate:g}-seed-{seed}"


def is_search(config: ConfigDict) -> bool:
    """Whether the config asks for several runs."""
    return bool(config.search.learning_rates or config.search.seeds)


def planned_runs(config: ConfigDict) -> dict[tuple[float, int], ConfigDict]:
    """The config of each run of a search, by learning rate and seed.

    InputError for a rate or a seed that is none or is given twice, and as `check_config` raises it.
    """
    wanted = (("learning_rates", (int, float), "numbers"), ("seeds", (int,), "whole numbers"))
    for name, kinds, words in wanted:
        values = list(config.search[name])
        if not all(isinstance(value, kinds) and not isinstance(value, bool) for value in values):
            raise InputError(f"search.{name}: {values} has to be of {words}")
        if len(set(values)) < len(values):
            raise InputError(f"search.{name}: {values} has one twice")
    rates = [float(rate) for rate in config.search.learning_rates] or [config.optimizer.learning_rate]
    runs = {at: _config_of_one(config, *at) for at in product(rates, list(config.search.seeds) or [config.seed])}
    for one in runs.values():
        check_config(one)
    return runs


def search(config: ConfigDict, workdir: str, *, stop: StopSignal | None = None, bars: Bars = silent) -> dict[str, Any]:
    """Runs `finetune` for each learning rate and seed, and writes what comes of it into `WORKDIR/search.json`.

    Returns `metric`, `by_learning_rate` (each with `median`, `best`, `worst` and the `scores` of its seeds), `best`
    (learning rate, seed, score and the folder of that run), `learning_rate`, which is the one with the best median, and
    of its seeds `median`, `spread` (best - worst) and `results`: all scores, by seed and split.
    Raises as `finetune` and `planned_runs` do.
    """
    runs = planned_runs(config)
    folder = remote.absolute(workdir)
    results: dict[float, dict[int, dict[str, Any]]] = {}
    with shared_programs(folder):
        for (rate, seed), of_one in runs.items():
            one = folder / folder_of(rate, seed)
            results.setdefault(rate, {})[seed] = _result(of_one, one, stop, bars)
    found = summarize(results)
    if is_first():
        atomic.write_whole(folder / SEARCH_FILE, (json.dumps(found, indent=2) + "\n").encode())
    return found


def _config_of_one(config: ConfigDict, rate: float, seed: int) -> ConfigDict:
    one = config.copy_and_resolve_references()
    with one.unlocked():
        one.optimizer.learning_rate, one.seed = rate, seed
        one.search.learning_rates, one.search.seeds = (), ()
    return one


def _result(config: ConfigDict, folder: epath.Path, stop: StopSignal | None, bars: Bars) -> dict[str, Any]:
    """What the run in `folder` came to, which is run unless it is finished."""
    path = folder / RESULT_FILE
    if remote.exists(path):
        check_same_run(folder, _read(folder / CONFIG_FILE), config, sources=("init", "data.path"))
    else:
        log.info("learning rate %g, seed %d", config.optimizer.learning_rate, config.seed)
        finetune(config, str(folder), needs_scores=True, stop=stop, bars=bars)
        wait_for_first()  # it writes what all of them read
    return _read(path)


def _read(path: epath.Path) -> dict[str, Any]:
    return json.loads(remote.patiently(path, path.read_text))


def _main_score(result: Mapping[str, Any]) -> float:
    return float(next(iter(result["scores"].values()))[result["main_metric"]])


def summarize(results: Mapping[float, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """What `search` returns, of what is in `result.json`, by learning rate and seed."""
    scores = {
        rate: {seed: _main_score(result) for seed, result in of_seeds.items()} for rate, of_seeds in results.items()
    }
    by_rate = {
        f"{rate:g}": {
            "median": statistics.median(of_seeds.values()), "best": max(of_seeds.values()),
            "worst": min(of_seeds.values()), "scores": {str(seed): score for seed, score in of_seeds.items()},
        }
        for rate, of_seeds in scores.items()
    }  # fmt: skip
    chosen = max(scores, key=lambda rate: statistics.median(scores[rate].values()))
    of_chosen = scores[chosen].values()
    rate, seed, score = max(
        ((rate, seed, score) for rate, of_seeds in scores.items() for seed, score in of_seeds.items()),
        key=lambda one: one[2],
    )
    return {
        "metric": next(iter(results[chosen].values()))["main_metric"], "by_learning_rate": by_rate,
        "best": {"learning_rate": rate, "seed": seed, "score": score, "folder": folder_of(rate, seed)},
        "learning_rate": chosen, "median": statistics.median(of_chosen), "spread": max(of_chosen) - min(of_chosen),
        "results": {str(seed): result["scores"] for seed, result in results[chosen].items()},
    }  # fmt: skip
