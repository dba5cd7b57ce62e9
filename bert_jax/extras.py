"""Optional packages: the command that installs what an extra of this package requires."""

import re
from importlib import metadata

PACKAGE = "bert-jax"


def install_hint(extra: str) -> str:
    """Returns the pip command that installs the requirements of an extra, such as `pip install 'gcsfs>=2024.6'`.

    It works wherever this package was installed from, an index or a clone.
    """
    pattern = re.compile(rf"""(.+?)\s*;\s*extra\s*==\s*['"]{re.escape(extra)}['"]""")
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        lines = []
    required = [match[1] for line in lines if (match := pattern.fullmatch(line))]
    if not required:  # a clone that is on the path without being installed, or was installed before it had the extra
        return f"pip install -e '.[{extra}]'"
    return f"pip install {' '.join(repr(requirement) for requirement in required)}"
