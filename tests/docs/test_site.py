"""Generated parts of the documentation, and the build of the site."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from generators import write_pages
from support import docs

from bert_jax import cli
from bert_jax.config_listing import type_of
from bert_jax.sections import flatten


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of generated parts."""
    folder = tmp_path_factory.mktemp("generated") / "parts"
    write_pages(folder)
    return folder


@pytest.mark.parametrize(
    ("page", "config"),
    [
        ("config_pretraining.md", "default"), ("config_finetuning.md", "finetune/default"),
        ("config_studies.md", "studies/default"),
    ],
)  # fmt: skip
def test_every_config_key_is_on_the_page_with_default_and_meaning(generated: Path, page: str, config: str):
    rows = re.findall(r"^\| \[`([\w.]+)`\]\S* \| `(.*?)` \| (\w+) \| (.*?) \|", (generated / page).read_text(), re.M)
    found = {name: (default, kind, meaning) for name, default, kind, meaning in rows}
    for key, value in flatten(type_of(config)()):
        if key.startswith("pretraining."):
            continue
        default, kind, meaning = found.pop(key)
        assert default == (f'"{value}"' if isinstance(value, str) else repr(value)), key
        assert kind == type(value).__name__
        assert len(meaning.split()) > 1, key
    assert not set(found) - {"pretraining"}


def test_every_command_and_option_is_on_the_page(generated: Path, capsys: pytest.CaptureFixture[str]):
    page = (generated / "commands.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n((?:.*\n)*?)(?=^## |\Z)", page, re.MULTILINE))
    for name, section in sections.items():
        with pytest.raises(SystemExit):
            cli.parse([name, "--help"])
        options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
        assert not {option for option in options if option not in section}, name
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    assert set(re.findall(r"^    ([a-z][\w-]*)", capsys.readouterr().out, re.MULTILINE)) == set(sections)
    assert "required" in sections["prepare"]
    assert str(os.cpu_count()) not in re.findall(r"`--workers[^|]*\| ([^|]*)", sections["prepare"])[0]


def test_the_api_page_names_what_is_public(generated: Path):
    import bert_jax

    page = (generated / "api.md").read_text()
    assert all(re.search(rf"^\.\. auto\w+:: bert_jax\.{name}$", page, re.MULTILINE) for name in bert_jax.__all__)


@pytest.mark.long
def test_the_site_builds_without_warnings(tmp_path: Path):
    pytest.importorskip("sphinx_book_theme")
    words = ["-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", docs.DOCS, tmp_path]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "BERT_JAX_DOCS_EXECUTE": "0"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "reference" / "config.html").read_text()
    assert 'id="pretrain-optimizer-learning-rate"' in page
    assert all((tmp_path / page.relative_to(docs.DOCS)).with_suffix(".html").exists() for page in docs.PAGES)
