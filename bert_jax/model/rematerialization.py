"""Rematerialization: the intermediates that the backward pass reads from memory; it recomputes the others."""

import functools
from typing import Any

import jax

rematerialized: Any = functools.partial(jax.checkpoint, prevent_cse=False)
"""Rematerializes the wrapped function in the backward pass; only its inputs are saved.

For cheap work: in a Transformer the elementwise ops between products, whose results are many times their inputs.
"""

# Names by `checkpoint_name` of the intermediates that the backward pass reads.
_NAMES = (
    "qkv", "attention_context", "fused_attention", "dropout_mask", "norm_input", "norm_scale", "norm_output",
    "feed_forward",
)  # fmt: skip
_NAMES_OF_LENGTH_BY_LENGTH = ("attention_probabilities", "attention_dropout_mask")

REMAT_POLICIES = {
    # Save the intermediates that the backward pass reads, by `checkpoint_name`. All others are elementwise work on
    # these, or weights that FSDP gathers, which would be the whole model if they were saved for every layer.
    "none": jax.checkpoint_policies.save_only_these_names(*_NAMES, *_NAMES_OF_LENGTH_BY_LENGTH),
    # Recompute attention's L x L arrays as well (Korthikanti et al. 2022, arXiv:2205.05198).
    "attention": jax.checkpoint_policies.save_only_these_names(*_NAMES),
    "dots": jax.checkpoint_policies.save_only_these_names("weight_product"),  # the results of `weight_einsum`
    "full": jax.checkpoint_policies.nothing_saveable,  # save only the input of each layer
}
