"""Tables of a report as HTML. Every text of a file is escaped."""

import html
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bert_jax.config_keys import FinetuneConfig, PretrainConfig
from bert_jax.sections import flatten
from bert_jax.tracking.report.reported_runs import PRETRAINING, ReportedRun, ReportedStudy

_MISSING = "–"
_SHOWN_EVALUATIONS = 8  # columns of a table of samples


def escape(text: object) -> str:
    """Escapes a text for HTML content and attributes."""
    return html.escape(str(text))


def number(value: float | None, form: str = ",.4g") -> str:
    """Formats a number; a missing one as a dash."""
    return _MISSING if value is None else format(value, form)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", words: int = 1) -> str:
    """Makes a table of cells in HTML below its caption; the first `words` columns are texts, the others numbers.

    A cell of a row may start with `<td`, to have attributes of its own.
    """
    head = "".join(f'<th scope="col"{"" if i < words else _NUMBER}>{cell}</th>' for i, cell in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(
            cell if cell.startswith("<td") else
            f'<th scope="row">{cell}</th>' if i == 0 else
            f"<td{'' if i < words else _NUMBER}>{cell}</td>" for i, cell in enumerate(row)
        ) + "</tr>"
        for row in rows
    )  # fmt: skip
    title = f'<p class="note">{caption}</p>' if caption else ""
    return (
        f'{title}<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


_NUMBER = ' class="number"'


# --- Runs --------------------------------------------------------------------------------------------------------


def pretraining_results(runs: Sequence[ReportedRun]) -> str:
    """Returns the last evaluation of each run beside the unigram baseline."""
    heads = [
        "run", "step", "tokens seen", "MLM loss (nats)", "unigram baseline (nats)", "below the baseline",
        "perplexity", "MLM accuracy", "NSP loss (nats)", "NSP accuracy", "skipped steps", "tokens/s (median)",
    ]  # fmt: skip
    rows = []
    for run in runs:
        training, last = run.split(None), (run.split("eval") or [{}])[-1]
        loss, baseline = last.get("mlm_loss"), last.get("unigram_loss")
        rates = [row["tokens_per_second"] for row in training if row.get("tokens_per_second")]
        final = training[-1] if training else {}
        tokens = last.get("tokens_seen", final.get("tokens_seen"))
        rows.append([
            escape(run.name), number(last.get("step", final.get("step")), ","), number(tokens, ","),
            number(loss, ".4f"), number(baseline, ".4f"),
            number(None if loss is None or baseline is None else baseline - loss, "+.4f"),
            number(None if loss is None else 2.718281828459045**min(loss, 700.0), ",.2f"),
            number(last.get("mlm_accuracy"), ".2%"), number(last.get("nsp_loss"), ".4f"),
            number(last.get("nsp_accuracy"), ".2%"), number(final.get("nonfinite_steps"), ","),
            number(statistics.median(rates) if rates else None, ",.0f"),
        ])  # fmt: skip
    note = "Last evaluation on held-out text. The unigram baseline predicts each target from word frequencies alone."
    return table(heads, rows, caption=note)


def finetuning_results(runs: Sequence[ReportedRun]) -> str:
    """Returns the scores of each run at the step of its result, by split; of an unfinished run, at its last step."""
    evaluations = [_result_evaluation(run) for run in runs]
    scores = list(dict.fromkeys(key for evaluation in evaluations for key in evaluation if "/" in key))
    rows = []
    for run, evaluation in zip(runs, evaluations, strict=True):
        training = run.split(None)
        steps = evaluation.get("step", training[-1]["step"] if training else None)
        loss = training[-1].get("loss") if training else None
        task = escape(run.result["task"]) if run.result.get("task") else _MISSING
        rows.append([
            escape(run.name), task, number(steps, ","), number(loss, ".4f"),
            *(number(evaluation.get(key), ".4f") for key in scores),
        ])  # fmt: skip
    heads = ["run", "task", "step", "training loss", *map(escape, scores)]
    return table(
        heads, rows, caption="Scores of the result, by split: of the last epoch, or of the best (keep_best).", words=2
    )


def _result_evaluation(run: ReportedRun) -> Mapping[str, Any]:
    """Returns the evaluation at the step in `result.json`, or else the last one; {} if there is none."""
    rows = run.split("eval")
    return next((row for row in rows if row["step"] == run.result.get("step")), rows[-1] if rows else {})


def config_differences(runs: Sequence[ReportedRun], kind: str) -> str:
    """Returns the keys whose value is not the default in some run, first those that differ between runs."""
    known = [run for run in runs if run.config]
    if not known:
        return "<p>No run has a config.json.</p>"
    spec = "default" if kind == PRETRAINING else "finetune/default"
    defaults = dict(flatten(PretrainConfig() if kind == PRETRAINING else FinetuneConfig()))
    rows = []
    for key in dict.fromkeys(key for values in (defaults, *(run.config for run in known)) for key in values):
        default = _text(defaults.get(key))
        values = [_text(run.config.get(key, defaults.get(key))) for run in known]
        if all(value == default for value in values):
            continue
        differ = len(set(values)) > 1
        mark = ' class="changed"'
        cells = [f"<td{mark if value != default else ''}><code>{escape(value)}</code></td>" for value in values]
        shown = f"<code>{escape(default)}</code>"
        rows.append((not differ, [f"<code>{escape(key)}</code>" + (" *" if differ else ""), shown, *cells]))
    if not rows:
        return "<p>All keys have their default values.</p>"
    note = f"Keys that differ from the config <code>{spec}</code>" + (
        "; those with * differ between runs." if any(not same for same, _ in rows) else "."
    )
    heads = ["key", "default", *(escape(run.name) for run in known)]
    return table(heads, [cells for _, cells in sorted(rows, key=lambda row: row[0])], caption=note, words=len(heads))


def full_config(run: ReportedRun) -> str:
    """Returns the whole config of a run, folded."""
    lines = "\n".join(f"{key} = {_text(value)}" for key, value in run.config.items())
    return f"<details><summary>All keys of {escape(run.name)}</summary><pre>{escape(lines)}</pre></details>"


def _text(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def samples_over_time(run: ReportedRun) -> str:
    """Returns a table for each masked text: a row for each mask, a column for each evaluation (evenly chosen)."""
    parts: list[str] = []
    by_text: dict[str, list[tuple[int, Any]]] = {}
    for row in run.samples:
        for sample in row["samples"]:
            by_text.setdefault(sample["text"], []).append((row["step"], sample["masks"]))
    for text, fills in by_text.items():
        count = min(_SHOWN_EVALUATIONS, len(fills))
        chosen = [fills[round(i * (len(fills) - 1) / max(1, count - 1))] for i in range(count)]
        rows = []
        for place, mask in enumerate(chosen[0][1]):
            cells = [_fill(masks[place]) for _, masks in chosen]
            rows.append([f"{place + 1}", f"<b>{escape(mask['target'])}</b>", *cells])
        heads = ["mask", "target", *(f"step {step:,}" for step, _ in chosen)]
        parts.append(f"<p class='sample'>{_marked(text)}</p>{table(heads, rows, words=len(heads))}")
    return "".join(parts)


def _marked(text: str) -> str:
    """Returns the escaped text with its masks numbered."""
    first, *others = text.split("[MASK]")
    return escape(first) + "".join(
        f'<span class="mask">[MASK {place}]</span>{escape(part)}' for place, part in enumerate(others, 1)
    )


def _fill(mask: Mapping[str, Any]) -> str:
    word, probability = mask["fills"][0]
    others = ", ".join(f"{word} {probability:.1%}" for word, probability in mask["fills"][1:])
    kind = "right" if word == mask["target"] else "wrong"
    title = f"then {others}; target {mask['probability']:.1%}"
    return f'<td class="{kind}" title="{escape(title)}">{escape(word)} <small>{probability:.0%}</small></td>'


# --- Searches and studies ----------------------------------------------------------------------------------------


def search_table(name: str, search: Mapping[str, Any]) -> str:
    """Returns the scores of a search by learning rate; the chosen rate has the best median."""
    rows = []
    for rate, found in search["by_learning_rate"].items():
        scores = list(found["scores"].values())
        deviation = statistics.stdev(scores) if len(scores) > 1 else None
        listed = ", ".join(f"{seed}: {score:.4f}" for seed, score in found["scores"].items())
        is_chosen = float(rate) == float(search["learning_rate"])
        rows.append([
            f"<b>{escape(rate)}</b> (chosen)" if is_chosen else escape(rate), number(len(scores), ","),
            number(statistics.fmean(scores), ".4f"), number(deviation, ".4f"), number(found["median"], ".4f"),
            number(found["worst"], ".4f"), number(found["best"], ".4f"), escape(listed),
        ])  # fmt: skip
    heads = ["learning rate", "seeds", "mean", "standard deviation", "median", "worst", "best", "scores by seed"]
    note = f"{escape(name)}: {escape(search['metric'])} on the first scored split. The best median chooses the rate."
    return table(heads, rows, caption=note)


def study_tables(study: ReportedStudy) -> str:
    """Returns the scores of a study, the differences to its first row, and the pre-training that they rest on."""
    content = study.table
    columns, rows = content["columns"], content["rows"]
    parts = [f"<h3>{escape(content.get('title') or study.name)}</h3>"]
    if content.get("note"):
        parts.append(f"<p>{escape(content['note'])}</p>")
    heads, scores, differences = [""], [], []
    has_paper = {column for column in columns if any(_cell(row, column).get("paper") is not None for row in rows)}
    for column in columns:
        heads += [escape(column), *(["paper"] if column in has_paper else [])]
    for row in rows:
        score, difference = [escape(row["name"])], [escape(row["name"])]
        for column in columns:
            cell = _cell(row, column)
            score.append(_mean_and_spread(cell))
            error = cell.get("difference_error")
            difference.append(number(cell.get("difference"), "+.2f") + ("" if error is None else f" ± {error:.2f}"))
            if column in has_paper:
                score.append(number(cell.get("paper"), ".1f"))
                difference.append(number(cell.get("paper_difference"), "+.1f"))
        scores.append(score)
        differences.append(difference)
    note = "Mean ± standard deviation over n fine-tuning seeds, at the learning rate with the best median."
    parts.append(table(heads, scores, caption=note))
    if len(rows) > 1:
        parts.append(
            table(heads, differences[1:], caption=f"Difference to {escape(rows[0]['name'])} ± standard error.")
        )
    parts.append(_pretraining_of_study(study))
    return "".join(parts)


def _cell(row: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    return row["columns"].get(column) or {}


def _mean_and_spread(cell: Mapping[str, Any]) -> str:
    if cell.get("mean") is None:
        return _MISSING
    deviation, count = cell.get("deviation"), len(cell.get("values") or ())
    listed = ", ".join(f"{value:.2f}" for value in cell.get("values") or ())
    spread = "" if deviation is None else f" ± {deviation:.2f}"
    return f'<td class="number" title="{escape(listed)}">{cell["mean"]:.2f}{spread} <small>n={count}</small></td>'


def _pretraining_of_study(study: ReportedStudy) -> str:
    rows = []
    for row in study.table["rows"]:
        pretraining, seed = row.get("pretraining") or {}, study.seeds.get(row["name"])
        rests_on = "1" + ("" if seed is None else f" (seed {seed})")
        if not pretraining:
            rests_on = "none, from scratch" if row.get("pretraining_seeds") == [] else "a given checkpoint"
        rows.append([
            escape(row["name"]), rests_on, number(pretraining.get("steps"), ","),
            number(pretraining.get("mlm_loss"), ".3f"), number(pretraining.get("mlm_accuracy"), ".2%"),
            number(pretraining.get("nsp_accuracy"), ".2%"),
        ])  # fmt: skip
    heads = ["", "pre-training seeds", "steps", "MLM loss (nats)", "MLM accuracy", "NSP accuracy"]
    note = (
        "Pre-training, on held-out text. Each row rests on one pre-training run: the deviations are over "
        "fine-tuning seeds alone, without the variation between pre-training seeds."
    )
    return table(heads, rows, caption=note, words=2)


# --- Compiled steps ----------------------------------------------------------------------------------------------


def compiled_tables(name: str, content: Mapping[str, Any]) -> str:
    """Returns the memory, the lower bounds of the time and the collectives of the output of `compile --json`."""
    rows, collectives = [], []
    for phase in content["phases"]:
        bounds = phase.get("roofline") or {}
        steps = f"{phase['steps'][0]:,}–{phase['steps'][1]:,}"
        mesh = " × ".join(f"{escape(axis)}={size}" for axis, size in phase["mesh"].items() if size > 1) or "one device"
        fastest = bounds.get("rows_per_second_at_most")
        rows.append([
            steps, f"{escape(phase['topology'])} × {phase['num_slices']}, {mesh}", escape(phase["remat"]),
            number(phase["global_batch_size"], ","), number(phase["seq_len"], ","),
            number(phase["peak_bytes"] / (1 << 30), ".2f"), number(phase["hbm_share"], ".0%"),
            "yes" if phase["fits"] else '<td class="wrong">no</td>',
            number((bounds and 1e3 * bounds["at_least_seconds"]) or None, ".1f"), escape(bounds.get("bound", _MISSING)),
            number(fastest and fastest * phase["seq_len"], ",.0f"),
        ])  # fmt: skip
        collectives += [
            [steps, escape(one["kind"]), escape(" ".join(one["axes"] or ["?"])), escape(one["dtype"]),
             number(one["count"], ","), number(one["bytes"] / (1 << 20), ",.2f")]
            for one in phase.get("collectives") or ()
        ]  # fmt: skip
    heads = [
        "steps", "devices", "remat", "rows per step", "tokens per row", "peak memory (GiB)", "share of HBM", "fits",
        "step at least (ms)", "bound by", "tokens/s at most",
    ]  # fmt: skip
    parts = [table(heads, rows, caption=f"{escape(name)}: compiled ahead of time, not measured.", words=3)]
    if collectives:
        heads = ["steps", "collective", "along", "type", "per step", "MiB per step"]
        parts.append(table(heads, collectives, caption="Collectives of each device.", words=4))
    return "".join(parts)
