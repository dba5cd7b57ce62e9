"""The version of the package, declared here alone: for `setup.py`, `bert-jax --version` and provenance records."""

__version__ = "0.1.0"
