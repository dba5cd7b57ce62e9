"""Fine-tuning: one run, or a search that runs every learning rate with every seed, as in the paper.

    bert-jax finetune --config=finetune/glue:sst2 --workdir=runs/sst2 \\
      --config.init=runs/base --config.data.path=glue/SST-2
    bert-jax finetune --config=finetune/glue:rte --workdir=runs/rte --config.init=runs/base \\
      --config.data.path=glue/RTE --config.search.learning_rates="(5e-5, 4e-5, 3e-5, 2e-5)" \\
      --config.search.seeds="(0, 1, 2, 3, 4)"

Each trial of a search is an independent run in its own folder of the workdir. A search that was killed resumes with
the trial that was running.
"""

import logging
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from jax.experimental import multihost_utils

from bert_jax.config_keys import FinetuneConfig
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.files.atomic import read_json, write_json
from bert_jax.finetuning.fine_tuned import RESULT_FILE, digests
from bert_jax.finetuning.run import check_config, check_same_run, finetune_once
from bert_jax.progress import Bars, silent
from bert_jax.runtime.compilation_cache import kept_programs
from bert_jax.runtime.interpreter import StopSignal
from bert_jax.runtime.processes import is_first
from bert_jax.sections import checked, with_values
from bert_jax.tracking.trackers import Tracker
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.run import CONFIG_FILE, workdir_path

log = logging.getLogger(__name__)

SEARCH_FILE = "search.json"


def folder_of(rate: float, seed: int) -> str:
    """Returns the name of a trial's folder."""
    return f"lr-{rate}-seed-{seed}"


def planned_runs(config: FinetuneConfig) -> dict[tuple[float, int], FinetuneConfig]:
    """Returns the config of each trial of a search, by learning rate and seed.

    Raises InputError for an invalid rate or seed, and as `check_config` does.
    """
    rates = config.search.learning_rates or (config.optimizer.learning_rate,)
    no_search = {"search.learning_rates": (), "search.seeds": ()}
    runs = {
        (rate, seed): with_values(config, {"optimizer.learning_rate": rate, "seed": seed, **no_search})
        for rate, seed in product(rates, config.search.seeds or (config.seed,))
    }
    for one in runs.values():
        check_config(one)
    return runs


def finetune(
    config: FinetuneConfig, workdir: str, *, stop: StopSignal | None = None, bars: Bars = silent,
    trackers: Sequence[Tracker] = (),
) -> dict[str, Any]:  # fmt: skip
    """Fine-tunes a checkpoint in `workdir`, resuming from the newest checkpoint there, if any.

    At the end it scores the labelled splits and writes `WORKDIR/result.json`. Predictions for every split but the
    training split go to `WORKDIR/predictions`. With `search.learning_rates` or `search.seeds` it makes a run of each,
    see `search`.

    Returns the official metrics of each labelled split, by split name; the summary of a search.

    Args:
      config: the run; see `configs/finetune/default.py`.
      workdir: folder of checkpoints, metrics and predictions.
      stop: an active `StopSignal`; by default one is active during this call.
      bars: creates progress bars.
      trackers: receivers of the metrics of a run, in process 0; closed at the end.

    Raises:
      InputError: the config, the checkpoint, the task's files and the devices are inconsistent, or the workdir holds
        another run.
      Interrupted: SIGTERM or SIGINT was received; the state is saved.
      BertJaxError: too many consecutive steps were not finite, and the state is saved; or the workdir is in use.
    """
    checked("config", FinetuneConfig, config)
    if not (config.search.learning_rates or config.search.seeds):
        return finetune_once(config, workdir, stop=stop, bars=bars, trackers=trackers)
    if trackers:
        raise InputError("trackers: a search has several runs; set config.tracking, or fine-tune without config.search")
    return search(config, workdir, stop=stop, bars=bars)


def search(
    config: FinetuneConfig, workdir: str, *, stop: StopSignal | None = None, bars: Bars = silent
) -> dict[str, Any]:
    """Runs `finetune` for each learning rate and seed, and writes a summary to `WORKDIR/search.json`.

    Returns the summary: `format_version`; `metric`; `by_learning_rate` (`median`, `best`, `worst`, and the `scores` of
    the seeds); `best` (learning rate, seed, score and folder of the best trial); `learning_rate`, the one with the best
    median; and its `results`: all scores, by seed and split. Raises as `finetune` and `planned_runs` do, and if `init`
    has other parameters, or the task other files, than a finished trial had.
    """
    runs = planned_runs(config)
    folder, encoder = workdir_path(workdir), open_checkpoint(config.init)
    results: dict[float, dict[int, dict[str, Any]]] = {}
    with kept_programs(config.compilation_cache, folder):
        for (rate, seed), trial in runs.items():
            place = folder / folder_of(rate, seed)
            if remote.exists(place / RESULT_FILE):
                check_same_run(place, read_json(place / CONFIG_FILE), trial, encoder, digests(config))
            else:
                log.info("Starting the trial learning_rate=%g, seed=%d", rate, seed)
                finetune_once(trial, str(place), needs_scores=True, stop=stop, bars=bars)
                multihost_utils.sync_global_devices("trial")  # process 0 writes the result that all processes read
            results.setdefault(rate, {})[seed] = read_json(place / RESULT_FILE)
    found = summarize(results)
    if is_first():
        write_json(folder / SEARCH_FILE, found)
    return found


def summarize(results: Mapping[float, Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Summarizes the contents of `result.json`, by learning rate and seed, as `search` returns them."""
    metric = next(iter(next(iter(results.values())).values()))["main_metric"]
    scores = {
        rate: {seed: float(next(iter(result["scores"].values()))[metric]) for seed, result in by_seed.items()}
        for rate, by_seed in results.items()
    }
    by_rate = {
        str(rate): {
            "median": statistics.median(by_seed.values()), "best": max(by_seed.values()),
            "worst": min(by_seed.values()), "scores": {str(seed): score for seed, score in by_seed.items()},
        }
        for rate, by_seed in scores.items()
    }  # fmt: skip
    chosen = max(scores, key=lambda rate: statistics.median(scores[rate].values()))
    rate, seed, score = max(
        ((rate, seed, score) for rate, by_seed in scores.items() for seed, score in by_seed.items()),
        key=lambda trial: trial[2],
    )
    return {
        "format_version": 1, "metric": metric,
        "by_learning_rate": by_rate,
        "best": {"learning_rate": rate, "seed": seed, "score": score, "folder": folder_of(rate, seed)},
        "learning_rate": chosen,
        "results": {str(seed): result["scores"] for seed, result in results[chosen].items()},
    }  # fmt: skip
