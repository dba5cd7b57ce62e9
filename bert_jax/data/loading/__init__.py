"""From prepared datasets to batches, each a pure function of its step."""
