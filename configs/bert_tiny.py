"""BERT-Tiny: 2 layers of 128, 2 heads; trains on a laptop's CPU.

    bert-jax pretrain --config=bert_tiny --workdir=runs/bert_tiny --config.data.path=DATASET

Parameters: 4,433,468 with 30,522 pieces, 1,552,898 with 8,192.
Tokens: 40,960,000 (20,000 steps x 16 sequences x 128).
Hardware, time: not yet run in one phase; made for three quarters of an hour on two CPU cores.
Score to expect: `benchmarks/reference_cpu.py`, which sees as many tokens, two fifths of them in sequences of 32, ended
at an MLM loss of 4.09 (unigram baseline 6.96) and an NSP accuracy of 91.0% on English Wikipedia and books, with 8,192
pieces. docs/numbers/expected_numbers.md has its curve. This schedule, in one phase, stays on the first plateau for
longer.

A model so small, on so little compute, needs many updates, so batches are small. There is no dropout, as it underfits.
Adam's bias correction is on, unlike in the paper: with a warm-up of hundreds of steps, not 10,000, the second moment is
still far too small when the rate is high, and without correction the MLM loss stays on its first plateau.
"""

from ml_collections import ConfigDict

from bert_jax.configs import bert


def get_config() -> ConfigDict:
    config = bert.get_config("tiny")
    config.model.initializer_range = 0.08  # About 1 / sqrt(hidden_size); the paper's 0.02 is for 768 and more.
    config.model.hidden_dropout_prob = 0.0
    config.model.attention_probs_dropout_prob = 0.0

    config.total_steps = 20_000
    config.global_batch_size = 16
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 500
    config.optimizer.bias_correction = True
    config.log_every_steps = 50
    config.eval_every_steps = 1_000
    config.eval_batches = 160
    config.checkpoint.every_steps = 1_000
    return config
