"""The rows of the paper's ablations (Devlin et al. 2019, tables 5, 6 and 8), each as a pre-training of its own.

    bert-jax pretrain --config=ablations:no_nsp --workdir=runs/no_nsp --config.data.path=DATASET

The rows, all else as in BERT-BASE:

table 5, tasks    bert_base, no_nsp, ltr_no_nsp; ltr_no_nsp_bilstm, which differs from ltr_no_nsp in fine-tuning alone
table 8, masks    mask_80_10_10, mask_100_0_0, mask_80_0_20, mask_80_20_0, mask_0_20_80, mask_0_0_100: the shares of
                  predicted tokens that become [MASK], stay as they are, and become a random token
table 6, sizes    with 30,522 pieces and all heads

    size            parameters
    L3_H768_A12     46,315,580
    L6_H768_A3      67,579,196
    L6_H768_A12     67,579,196
    L12_H768_A12   110,106,428
    L12_H1024_A16  185,071,420
    L24_H1024_A16  336,226,108

Tokens: 32,768,000,000 (1,000,000 steps x 256 sequences x 128), each row.
Hardware, time: not yet run. `benchmarks/small_study.sh` has run table 5 with BERT-Tiny.
Score to expect: the paper's, which `studies/table5`, `studies/table6` and `studies/table8` list. These studies
pre-train and fine-tune all rows of a table.
"""

from ml_collections import ConfigDict

from bert_jax.configs import bert

_LTR: dict[str, object] = {"objective.lm": "ltr", "objective.nsp": False}


def _size(layers: int, hidden: int, heads: int) -> dict[str, object]:
    return {
        "model.num_hidden_layers": layers, "model.hidden_size": hidden, "model.num_attention_heads": heads,
        "model.intermediate_size": 4 * hidden,
    }  # fmt: skip


def _masks(mask: int, same: int, random: int) -> dict[str, object]:
    return {
        "objective.mask_token": mask / 100, "objective.keep_token": same / 100, "objective.random_token": random / 100
    }  # fmt: skip


TABLE_5: dict[str, dict[str, object]] = {
    "bert_base": {}, "no_nsp": {"objective.nsp": False}, "ltr_no_nsp": _LTR, "ltr_no_nsp_bilstm": _LTR
}  # fmt: skip
TABLE_6 = {
    f"L{layers}_H{hidden}_A{heads}": _size(layers, hidden, heads)
    for layers, hidden, heads in (
        (3, 768, 12), (6, 768, 3), (6, 768, 12), (12, 768, 12), (12, 1024, 16), (24, 1024, 16)
    )
}  # fmt: skip
TABLE_8 = {
    f"mask_{mask}_{same}_{random}": _masks(mask, same, random)
    for mask, same, random in (
        (80, 10, 10), (100, 0, 0), (80, 0, 20), (80, 20, 0), (0, 20, 80), (0, 0, 100)
    )
}  # fmt: skip
ROWS = {**TABLE_5, **TABLE_6, **TABLE_8}
"""Overrides of BERT-BASE's config, by the row's name."""


def get_config(row: str = "bert_base") -> ConfigDict:
    if row not in ROWS:
        raise ValueError(f"{row!r}: unknown row; expected one of {', '.join(ROWS)}")
    config = bert.get_config()
    config.update_from_flattened_dict(ROWS[row])
    return config
