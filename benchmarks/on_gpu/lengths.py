"""Prints the sequence lengths of a prepared dataset, at the middles of 16 quantiles: `LENGTHS` of steps.py.

python benchmarks/on_gpu/lengths.py DATASET
"""

import sys

import numpy as np

from bert_jax.data.dataset import PreparedDataset

QUANTILES = 16

if __name__ == "__main__":
    lengths = PreparedDataset(sys.argv[1]).lengths("train")
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES
    print(f"{len(lengths):,} sequences of {lengths.mean():.1f} tokens on average")
    print(tuple(np.quantile(lengths, places).round().astype(int).tolist()))
