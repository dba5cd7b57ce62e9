"""BERT-Tiny: 2 layers of 128, 2 heads; trains on a laptop's CPU.

    bert-jax pretrain --config=bert_tiny --workdir=runs/bert_tiny --config.data.path=DATASET

The schedule is for an hour on two CPU cores and some 50 million tokens: small batches, a high learning rate and no
dropout, because so small a model on so little compute underfits. Adam's bias correction is on, unlike in the paper:
with a warm-up of hundreds of steps, not 10,000, the second moment is still far too small when the rate is high, and
without correction (at 3e-3) the MLM loss stays at 6.4 for thousands of steps. The README has the curves to expect.
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

    config.total_steps = 6_700
    config.global_batch_size = 64
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 670
    config.optimizer.bias_correction = True
    config.log_every_steps = 20
    config.eval_every_steps = 500
    config.eval_batches = 40
    config.checkpoint.every_steps = 500
    return config
