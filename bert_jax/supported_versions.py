"""Declares once which versions of other packages are supported; `setup.py` runs this file."""

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
