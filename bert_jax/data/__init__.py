"""From raw text to batches: corpus readers, tokenization, prepared datasets, masking and loading.

NumPy only: nothing here imports JAX, a model or the training loop.
"""
