"""Files of a version that is newer than known: refused in one line, with status 2 and the way out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from etils import epath

from bert_jax.data.dataset import INFO_FILE, PreparedDataset
from bert_jax.errors import InputError
from bert_jax.files import provenance
from bert_jax.files.atomic import read_json
from bert_jax.finetuning.fine_tuned import RESULT_FILE


def newer(path: Path) -> Path:
    """Raises the version of a JSON file by 100."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, "format_version": content.get("format_version", 1) + 100}))
    return path


READERS: dict[str, Callable[[Path], object]] = {
    INFO_FILE: lambda path: PreparedDataset(str(path.parent)),
    provenance.FILE: lambda path: provenance.append(epath.Path(path.parent), {}),
    RESULT_FILE: lambda path: read_json(epath.Path(path)),
}


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_newer_version_is_refused(name: str, tmp_path: Path):
    path = newer(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name}: format_version=101: .*install") as refused:
        READERS[name](path)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_status == 2
    path.write_text(json.dumps({"format_version": "1"}))
    with pytest.raises(InputError, match=name):
        READERS[name](path)
