"""Generated parts of the documentation, and the build of the site."""

import os
import re
import sys
from pathlib import Path

import pytest
from generators import write_pages
from support import child_processes, docs

from bert_jax.command_line.arguments import COMMANDS
from bert_jax.config import load_config
from bert_jax.sections import flatten


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of generated parts."""
    folder = tmp_path_factory.mktemp("generated") / "parts"
    write_pages(folder)
    return folder


def test_every_config_key_is_on_the_page_with_its_default_and_meaning(generated: Path):
    pages = {"default": "config_pretraining.md", "finetune/default": "config_finetuning.md"}
    for config, page in pages.items():
        rows = re.findall(r"^\| \[`([\w.]+)`\]\S* \| `(.*?)` \| \w+ \| .+? \|", (generated / page).read_text(), re.M)
        values = [
            (key, f'"{value}"' if isinstance(value, str) else repr(value))
            for key, value in flatten(type(load_config(config, kind=None))())
        ]
        assert sorted(rows) == sorted(values)


def test_every_command_is_on_the_page_with_its_options(generated: Path):
    page = (generated / "commands.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n((?:.*\n)*?)(?=^## |\Z)", page, re.MULTILINE))
    assert sections.keys() == COMMANDS.keys()
    assert re.search(r"`--input GLOB ...` \| required \|", sections["prepare"])
    assert re.search(r"`--workers WORKERS` \|  \|", sections["prepare"])  # not the number of this machine's cores


def test_the_api_page_names_what_is_public(generated: Path):
    import bert_jax

    page = (generated / "api.md").read_text()
    assert all(re.search(rf"^\.\. auto\w+:: bert_jax\.{name}$", page, re.MULTILINE) for name in bert_jax.__all__)


@pytest.mark.long
def test_the_site_builds_without_warnings(tmp_path: Path):
    pytest.importorskip("sphinx_book_theme")
    words = ["-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", docs.DOCS, tmp_path]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "BERT_JAX_DOCS_EXECUTE": "0"}
    done = child_processes.run([sys.executable, *map(str, words)], env=environment, timeout=1000)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "reference" / "config.html").read_text()
    assert 'id="pretrain-optimizer-learning-rate"' in page
    assert all((tmp_path / page.relative_to(docs.DOCS)).with_suffix(".html").exists() for page in docs.PAGES)
