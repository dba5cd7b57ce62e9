"""A BERT of any size, by layers, hidden size and, where it is not a head for each 64, heads.

    bert-jax pretrain --config=bert:L4_H256 --workdir=runs/L4_H256 --config.data.path=DATASET
    bert-jax pretrain --config=bert:L6_H768_A3 ...

The released small models are L in 2, 4, 6, 8, 10, 12 by H in 128, 256, 512, 768 (Turc et al. 2019, arXiv:1908.08962);
the paper's table 6 has L3_H768_A12, L6_H768_A3, L6_H768_A12, L12_H768_A12, L12_H1024_A16 and L24_H1024_A16.
"""

import re

from bert_jax.configs import default


def get_config(size="L12_H768"):
    match = re.fullmatch(r"L(\d+)_H(\d+)(?:_A(\d+))?", size)
    if not match:
        raise ValueError(f"{size!r}: unknown size; expected L4_H256, or L4_H256_A4 with the number of heads")
    layers, hidden = int(match[1]), int(match[2])
    if not match[3] and hidden % 64:
        raise ValueError(
            f"{size!r}: hidden size {hidden} is not a multiple of 64; add the number of heads, as in L4_H96_A4"
        )
    config = default.get_config()
    config.model.num_hidden_layers = layers
    config.model.hidden_size = hidden
    config.model.num_attention_heads = int(match[3] or hidden // 64)
    config.model.intermediate_size = 4 * hidden
    return config
