"""JSON files with a checksum of their own: a changed bit is noticed, and the file is named."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from etils import epath

from bert_jax.errors import InputError
from bert_jax.files import provenance
from bert_jax.files.json_checksums import checked, is_intact, with_checksum
from bert_jax.finetuning.results import read_result, write_result
from bert_jax.tracking.report.reported_runs import read_reported

CONTENT = {"format_version": 1, "steps": [0, 30], "score": 0.5, "nested": {"é": None}}


def flips(content: bytes) -> list[bytes]:
    """Returns the content with each of its bits flipped, one at a time."""
    return [
        content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
        for at in range(len(content)) for bit in range(8)
    ]  # fmt: skip


def test_no_flipped_bit_changes_a_value_without_notice(tmp_path: Path):
    """A flip in the name of the checksum takes the checksum away, and nothing else."""
    noticed = 0
    for changed in flips((json.dumps(with_checksum(CONTENT)) + "\n").encode()):
        try:
            found = json.loads(changed)
            content = checked(tmp_path, found, "advice")
        except (ValueError, InputError):
            noticed += 1
        else:
            assert {key: value for key, value in content.items() if key in CONTENT} == CONTENT
    assert noticed > 800


def test_checksum_does_not_depend_on_the_order_of_keys_or_kinds_of_sequences():
    assert is_intact(dict(reversed(with_checksum({"a": (1, 2), "b": 1.5}).items())))
    assert is_intact(json.loads(json.dumps(with_checksum({"a": (1, 2), "b": 1e-7, "c": {3: 4}}))))
    assert is_intact({"of an earlier version": 1})
    assert not is_intact({**with_checksum(CONTENT), "more": 1})


def result(folder: Path) -> Path:
    write_result(epath.Path(folder / "result.json"), {"format_version": 1, "step": 30, "scores": {"dev": {"f1": 0.3}}})
    return folder / "result.json"


def table(folder: Path) -> Path:
    content = with_checksum({"format_version": 1, "title": "", "columns": [], "rows": [], "note": "30"})
    (folder / "table.json").write_text(json.dumps(content))
    return folder / "table.json"


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (result, lambda path: read_result(epath.Path(path))),
        (table, lambda path: read_reported([str(path)])),
    ],
    ids=["result.json", "table.json"],
)
def test_a_changed_digit_is_refused_by_name(
    write: Callable[[Path], Path], read: Callable[[Path], object], tmp_path: Path
):
    path = write(tmp_path)
    read(path)
    changed = path.read_bytes().replace(b"30", b"70", 1)
    path.write_bytes(changed)
    with pytest.raises(InputError, match=rf"{path}: damaged \(.*checksum") as refusal:
        read(path)
    assert "\n" not in str(refusal.value)


def test_a_changed_digit_of_provenance_is_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / provenance.FILE
    provenance.append(epath.Path(tmp_path), {"start_step": 30})
    damaged = path.read_bytes().replace(b"30", b"70")
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        provenance.append(epath.Path(tmp_path), {"start_step": 40})
    assert (tmp_path / provenance.DAMAGED_FILE).read_bytes() == damaged
    assert provenance.DAMAGED_FILE in caplog.text
    assert json.loads(path.read_text())["runs"] == [{"start_step": 40}]
