"""Configs that come with bert_jax; `--config=NAME` finds them here."""
