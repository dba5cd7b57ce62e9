"""Tables of all config keys: default, type and comment, read from the sources of the configs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bert_jax.config import load_config
from bert_jax.config_keys import StudyRow, StudyTask
from bert_jax.config_listing import key_comments
from bert_jax.finetuning.run import CHANGEABLE
from bert_jax.sections import flatten
from bert_jax.training import phases, run

SECTIONS = {  # the first part of a key: the heading of its table
    "": "The run",
    "model": "Model",
    "objective": "Objective",
    "data": "Data",
    "task": "Task",
    "head": "Output layers",
    "optimizer": "Optimizer",
    "target": "Target",
    "search": "Search",
    "mesh": "Mesh",
    "checkpoint": "Checkpoints",
    "checkpoints": "Checkpoints",
    "profile": "Profile",
    "tracking": "Trackers",
}


@dataclass(frozen=True)
class Key:
    """A key of a config: its value, and the comment beside it."""

    name: str
    default: object
    comment: str

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0].partition(".")[0]


def keys(config: str) -> list[Key]:
    """Returns the keys of a packaged config, in the order of the sources.

    Raises ValueError for a key without a comment.
    """
    kind = type(load_config(config, kind=None))
    comments = key_comments(kind)
    order = {key: number for number, key in enumerate(comments)}
    found = []
    for name, value in flatten(kind()):
        if config == "studies/default" and name.startswith("pretraining."):
            continue
        comment = comments.get(name) or comments.get(name.rpartition(".")[0])
        if not comment:
            raise ValueError(f"configs/{config}.py: {name} has no comment; say what it is, with its unit")
        found.append(Key(name, value, comment))
    if config == "studies/default":
        found.append(Key("pretraining", "configs/bert.py", comments["pretraining"]))
    return sorted(found, key=lambda key: order.get(key.name, order.get(key.name.rpartition(".")[0], 0)))


def pretraining() -> str:
    """Returns the tables of pre-training's keys."""
    return _tables(keys("default"), "pretrain", {
        "phase": phases.is_phase_key,
        "on resume": lambda key: key.startswith(run.CHANGEABLE),
    })  # fmt: skip


def finetuning() -> str:
    """Returns the tables of fine-tuning's keys."""
    return _tables(keys("finetune/default"), "finetune", {
        "on resume": lambda key: key.startswith(CHANGEABLE),
    })  # fmt: skip


def studies() -> str:
    """Returns the tables of a study's keys, and of the keys of its rows and tasks."""
    parts = [_tables(keys("studies/default"), "study", {})]
    for entry in (StudyRow, StudyTask):
        parts.append(f"### `{entry.__name__}`\n\n{entry.__doc__}\n\n| key | meaning |\n| --- | --- |")
        parts[-1] += "".join(f"\n| `{name}` | {_cell(text)} |" for name, text in key_comments(entry).items())
    return "\n\n".join(parts) + "\n"


def _tables(found: list[Key], command: str, marks: Mapping[str, Callable[[str], bool]]) -> str:
    sections: dict[str, list[Key]] = {}
    for key in found:
        sections.setdefault(key.section, []).append(key)
    parts = []
    for section in sorted(sections, key=lambda name: ([*SECTIONS, name].index(name), name)):
        heading = SECTIONS.get(section, section.capitalize().replace("_", " "))
        columns = ["key", "default", "type", "meaning", *marks]
        lines = [f"### {heading}\n", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        for key in sections[section]:
            anchor = f"{command}-{key.name}".replace(".", "-").replace("_", "-")
            cells = [f"[`{key.name}`]{{#{anchor}}}", f"`{_literal(key.default)}`", type(key.default).__name__]
            cells += [_cell(key.comment), *("yes" if mark(key.name) else "" for mark in marks.values())]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
