"""Scores of a run before its first step and after its last one, on the new and on the old domain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OLD = "old_"
"""Start of the names of scores on the dataset in `eval_old_data`; other scores are those of `data.path`."""
SCORES = {
    "mlm_loss": "MLM loss (nats)", "mlm_accuracy": "MLM accuracy", "nsp_loss": "NSP loss (nats)",
    "nsp_accuracy": "NSP accuracy",
}  # fmt: skip
DOMAINS = {"": "new", OLD: "old"}
"""Names of the domains, by the start of the names of their scores."""


@dataclass(frozen=True)
class Change:
    """A score before and after a run. `domain` is a value of `DOMAINS`, `score` a key of `SCORES`."""

    domain: str
    score: str
    before: float
    after: float


def find_changes(rows: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Returns the changes from the evaluation at step 0 to the last one; empty without an evaluation at step 0."""
    evaluations = [row for row in rows if row.get("split") == "eval"]
    if not evaluations or evaluations[0]["step"] != 0 or evaluations[-1]["step"] == 0:
        return []
    before, after = evaluations[0], evaluations[-1]
    return [
        Change(domain, score, before[prefix + score], after[prefix + score])
        for prefix, domain in DOMAINS.items() for score in SCORES
        if before.get(prefix + score) is not None and after.get(prefix + score) is not None
    ]  # fmt: skip


def render_changes(changes: Sequence[Change]) -> list[str]:
    """Returns the lines of a table of changes, with a head; empty without changes."""
    if not changes:
        return []
    lines = [f"{'domain':<8}{'score':<18}{'before':>10}{'after':>10}{'change':>10}"]
    for change in changes:
        numbers = f"{change.before:>10.4f}{change.after:>10.4f}{change.after - change.before:>+10.4f}"
        lines.append(f"{change.domain:<8}{SCORES[change.score]:<18}{numbers}")
    return lines
