"""From corpora to prepared datasets."""
