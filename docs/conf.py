"""Sphinx configuration. `make docs` builds the site; BERT_JAX_DOCS_EXECUTE=0 shows notebooks without running them."""

import os
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "benchmarks")]

from generators import result_values, write_pages  # noqa: E402

from bert_jax import __version__  # noqa: E402

# Shell cells of notebooks call bert-jax.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

project = "bert_jax"
author = "the bert_jax authors"
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_generated", "generators"]
suppress_warnings = ["config.cache"]  # setup() is a function, which no cache holds

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath", "substitution"]
myst_substitutions = result_values()  # {{ NAME.VALUE }} is a number of benchmarks/results/NAME.json
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp, .go"

nb_execution_mode = "cache"
if os.environ.get("BERT_JAX_DOCS_EXECUTE") == "0":
    nb_execution_mode = "off"
    suppress_warnings += ["misc.highlighting_failure"]  # only an executed notebook is known to be IPython: `!bert-jax`
nb_execution_cache_path = str(DOCS / "_build" / "notebooks")
nb_execution_in_temp = True  # docs/quickstart.md writes files
nb_execution_timeout = 1800  # seconds for a notebook's cell
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"  # the fields of a dataclass are listed below it
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
default_role = "code"  # `name` in a docstring is code
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # else an attribute in a docstring and the field that it describes are duplicates

html_theme = "sphinx_book_theme"
html_title = "bert_jax"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_sourcelink = False
html_theme_options = {
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
}

linkcheck_timeout = 20  # seconds
linkcheck_retries = 2
linkcheck_workers = 4
linkcheck_anchors = False


def mark_commands(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Makes the commands below `Examples:` of a docstring a literal block, before napoleon reads it."""
    if "Examples:" in lines:
        at = lines.index("Examples:") + 1
        end = next((n for n in range(at, len(lines)) if lines[n].strip() and not lines[n].startswith(" ")), len(lines))
        lines[at:end] = ["  ::", "", *(f"  {line}" if line.strip() else "" for line in lines[at:end])]


def setup(app: Any) -> None:
    """Writes the generated parts of pages, before Sphinx reads them."""
    write_pages(DOCS / "_generated")
    app.connect("autodoc-process-docstring", mark_commands, priority=400)
