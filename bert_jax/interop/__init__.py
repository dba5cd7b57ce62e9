"""Other formats: what bert_jax writes for, and reads from, other software."""
