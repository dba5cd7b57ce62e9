"""Declares once which versions of other packages are supported: for `setup.py` and for `import bert_jax`.

Imports the standard library alone: `setup.py` runs this file before any package is installed.
"""

import warnings
from collections.abc import Iterable

REQUIREMENTS = (
    "array_record>=0.8.1,<0.9",
    "etils[epath]>=1.10,<2",
    "flax>=0.12.5,<0.13",
    "fsspec",
    "grain>=0.2.18,<0.3",
    "jax>=0.10,<0.13",
    "matplotlib>=3.8.4,<4",
    "ml_collections>=1.0,<2",
    "numpy>=2.0,<3",
    "plotly>=6.0,<8",
    "optax>=0.2.6,<0.3",
    "orbax-checkpoint>=0.11.30,<0.13",
    "packaging",
    "pyarrow>=18.0,<27",
    "PyYAML>=6.0.3,<7",
    "protobuf>=5.29,<8",
    "safetensors>=0.5,<0.9",
    "sentencepiece>=0.2.0,<0.3",
    "sentencex>=1.0.11,<2",
    "shtab>=1.13,<2",
    "tensorboard>=2.18,<3",
    "tensorflow-datasets>=4.9.10,<5",
    "tokenizers>=0.21,<0.24",
    "tqdm>=4.66,<5",
)
"""The range of each package, from the lowest version that the tests pass with to below the next untested series."""

CHECKED_AT_IMPORT = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")
"""The packages whose releases have changed what this one calls. pip holds the ranges of the others."""


def check_installed(requirements: Iterable[str] = REQUIREMENTS) -> None:
    """Raises ImportError for a package below its range and warns of one above it: it may work, but is untested.

    A package that is not installed is left to the import that needs it.
    """
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.version import Version

    for text in requirements:
        requirement = Requirement(text)
        if requirement.name not in CHECKED_AT_IMPORT:
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if requirement.specifier.contains(Version(found).base_version):
            continue
        fix = f"expected {text}; run: pip install '{text}'"
        if any(one.operator == ">=" and Version(found) < Version(one.version) for one in requirement.specifier):
            raise ImportError(f"{requirement.name} {found} is not supported: {fix}")
        warnings.warn(f"{requirement.name} {found} has not been tested: {fix}", stacklevel=3)
