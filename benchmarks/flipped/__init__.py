"""Files of bert_jax in which one bit is flipped, and their readers."""
