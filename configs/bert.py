"""BERT of any size: a name such as `base`, or layers and hidden size such as `L4_H256`.

`_A3` adds the number of attention heads, by default one for every 64 of the hidden size.

    bert-jax pretrain --config=bert_base --workdir=runs/bert_base --config.data.path=DATASET
    bert-jax pretrain --config=bert:L4_H256 ...
    bert-jax pretrain --config=bert:L6_H768_A3 ...

Parameters, with 30,522 pieces and all heads:

    size     layers  hidden  heads   parameters
    tiny          2     128      2    4,433,468
    mini          4     256      4   11,267,900
    small         4     512      8   29,058,876
    medium        8     512      8   41,668,412
    base         12     768     12  110,106,428
    large        24    1024     16  336,226,108

`bert_mini`, `bert_small`, `bert_medium` and `bert_base` are these. `bert_tiny` and `bert_large` have recipes
of their own. The released small models are L in 2, 4, 6, 8, 10, 12 by H in 128, 256, 512, 768 (Turc et al. 2019,
arXiv:1908.08962). The sizes of the paper's table 6 are in `ablations.py`.

Tokens: 32,768,000,000 (1,000,000 steps x 256 sequences x 128).
Hardware, time: not yet run.
Score to expect: an MLM loss of 1.38 for BASE (perplexity 3.99, the paper's table 6).
docs/numbers/expected_numbers.md lists other records.
"""

import re

from ml_collections import ConfigDict

from bert_jax.configs import default

SIZES = {
    "tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "medium": (8, 512), "base": (12, 768), "large": (24, 1024)
}  # fmt: skip
"""Layers and hidden size."""


def get_config(size: str = "base") -> ConfigDict:
    match = re.fullmatch(r"L(\d+)_H(\d+)(?:_A(\d+))?", size)
    if not match and size not in SIZES:
        raise ValueError(
            f"{size!r}: unknown size; expected {', '.join(SIZES)}, or L4_H256, or L4_H256_A4 with the number of heads"
        )
    layers, hidden, heads = [int(number or 0) for number in match.groups()] if match else [*SIZES[size], 0]
    if not heads and hidden % 64:
        raise ValueError(
            f"{size!r}: hidden size {hidden} is not a multiple of 64; add the number of heads, as in L4_H96_A4"
        )
    config = default.get_config()
    config.model.num_hidden_layers = layers
    config.model.hidden_size = hidden
    config.model.num_attention_heads = heads or hidden // 64
    config.model.intermediate_size = 4 * hidden
    return config
