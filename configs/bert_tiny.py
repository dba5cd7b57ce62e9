"""BERT-Tiny: 2 layers of 128, 2 heads; trains on a laptop's CPU.

    bert-jax pretrain --config=bert_tiny --workdir=runs/bert_tiny --config.data.path=DATASET

The schedule is for three quarters of an hour on two CPU cores and 41 million tokens. What so small a model on so little
compute wants is many updates, so batches are small; there is no dropout, as it underfits. Adam's bias correction is
on, unlike in the paper: with a warm-up of hundreds of steps, not 10,000, the second moment is still far too small when
the rate is high, and without correction the MLM loss stays on its first plateau. The README has the curves to expect.
"""

from bert_jax.configs import default


def get_config():
    config = default.get_config()
    config.model.num_hidden_layers = 2
    config.model.hidden_size = 128
    config.model.num_attention_heads = 2
    config.model.intermediate_size = 512
    config.model.initializer_range = 0.08  # about 1 / sqrt(hidden_size); the paper's 0.02 is for 768 and more
    config.model.hidden_dropout_prob = 0.0
    config.model.attention_probs_dropout_prob = 0.0
    config.scan_layers = False  # two layers compile fast enough unrolled, and run faster on a CPU

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
