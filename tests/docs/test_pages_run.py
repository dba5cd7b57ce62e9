"""Code of the documentation, run in page order in a prepared folder, with few steps of a tiny model.

A page is run as a whole, because its later blocks use what the earlier ones wrote; `docs.shrink` has the settings.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from support import child_processes, docs, helpers
from support.devices import one_device  # noqa: F401

pytestmark = pytest.mark.long
OPTIONAL = {"transformers", "torch", "grain", "wandb", "sklearn", "gcsfs", "apache_beam"}
"""Packages that a block may import and that may be absent."""
PAGES = [page for page in [*docs.PAGES, *docs.OTHER_PAGES] if any(block.is_run for block in docs.read_blocks(page))]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    docs.write_folder(folder)
    docs.write_program(folder / ".programs")
    for name in ("launch", "benchmarks", "configs"):
        (folder / name).symlink_to(helpers.REPOSITORY / name)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=docs.name)
def test_page(page: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(prepared, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict = {"__name__": "__main__"}
    fresh, config, missing = set(docs.COMMANDS), "", set()
    for block in filter(lambda block: block.is_run, docs.read_blocks(page)):
        if block.shell:
            for item in [item for item in fresh if re.search(rf"--(output|workdir)[= ]{item}/?(\s|$)", block.text)]:
                fresh.remove(item)  # the page writes it itself
                shutil.rmtree(item) if Path(item).is_dir() else Path(item).unlink()
            for named in re.findall(r"--config=([\w./-]+\.py)", block.text):
                if config and not Path(named).exists():  # the config that the page shows
                    Path(named).write_text(config)
            environment = helpers.child_environment(PATH=f"{tmp_path / '.programs'}:{os.environ['PATH']}")
            command = ["bash", "-euo", "pipefail", "-c", block.shell]
            done = child_processes.run(command, env=environment, timeout=1000)
            assert done.returncode == 0, f"{block}\n{block.text}\n{done.stdout}\n{done.stderr}"
            continue
        config = block.text if "def get_config(" in block.text else config
        try:
            exec(compile(block.text, str(block), "exec"), names)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL:
                raise
            missing.add(error.name)
    if missing:
        pytest.skip(f"blocks were not run: {missing} not installed")
