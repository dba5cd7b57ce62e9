"""Parts of pages that are made from the code and from the results of benchmarks, when the site is built."""

from pathlib import Path

from generators import api_pages, command_pages, config_pages, result_pages
from generators.result_pages import result_values

__all__ = ["result_values", "write_pages"]


def write_pages(folder: Path) -> list[Path]:
    """Writes all parts to `folder`, and returns their paths. A file whose content is the same is left alone."""
    pages = {
        "api.md": api_pages.api(),
        "commands.md": command_pages.commands(),
        "config_pretraining.md": config_pages.pretraining(),
        "config_finetuning.md": config_pages.finetuning(),
        "config_studies.md": config_pages.studies(),
        **result_pages.pages(),
    }
    folder.mkdir(exist_ok=True)
    for old in set(folder.glob("*.md")) - {folder / name for name in pages}:
        old.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # else Sphinx reads its pages again
            path.write_text(text, encoding="utf-8")
    return [folder / name for name in pages]
