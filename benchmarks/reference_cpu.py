"""Config of the reference run: BERT-Tiny on 41 M tokens, in rows of 32 and then 128, within 40 minutes on two cores.

    benchmarks/reference_cpu.sh

The short sequences come first because on sequences of 128 so small a model starts by averaging over all tokens: each
neighbour has 1/128 of the attention, the positions hardly matter, and the MLM loss stays for long on a plateau some 0.7
nats under the unigram baseline. At 32 there is no such plateau, and the learned parameters carry over.
"""

from bert_jax.configs import bert_tiny


def get_config():
    config = bert_tiny.get_config()
    config.total_steps = 20_000
    config.phases = (
        {"steps": 8_000, "data.path": "", "global_batch_size": 64, "eval_batches": 40},
        {"steps": -1, "data.path": ""},
    )
    return config
