"""Prints the unigram baseline of a prepared dataset's eval split, masked and left-to-right, without any model.

    python benchmarks/unigram_baseline.py DATA [--batch_size 16] [--batches 160]

Every evaluation of pre-training prints one of the two. For the dataset of small_study.sh (OUTPUT/data128) with the
batches of `bert_tiny` it prints the figures in the study's tables.
"""

import argparse

import numpy as np

from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import EvalLoader
from bert_jax.training.evaluation import unigram_nats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="folder of a prepared dataset")
    parser.add_argument("--batch_size", type=int, default=16, help="rows per batch (default 16)")
    parser.add_argument("--batches", type=int, default=160, help="number of batches; -1: the whole split (default 160)")
    arguments = parser.parse_args()
    dataset = PreparedDataset(arguments.data)
    for left_to_right in (False, True):
        nats = unigram_nats([dataset], left_to_right=left_to_right)
        loader = EvalLoader(
            [dataset], batch_size=arguments.batch_size, batches=arguments.batches, left_to_right=left_to_right
        )
        targets = np.zeros(len(nats))
        for batch in loader:
            targets += np.bincount(batch["masked_ids"].ravel(), batch["masked_weights"].ravel(), len(nats))
        sep = targets[dataset.tokenizer.sep_id] / targets.sum()
        name = "left-to-right" if left_to_right else "masked"
        print(f"{name}: {targets @ nats / targets.sum():.6f} nats; {sep:.2%} of the targets are [SEP]")


if __name__ == "__main__":
    main()
