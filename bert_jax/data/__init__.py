"""Training data: preparation of datasets from raw text, prepared datasets, and loading of masked batches.

Batches are NumPy arrays. No module of this package imports JAX, a model or the training loop.
"""
