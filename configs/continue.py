"""Continued pre-training of a checkpoint on other texts, with its sizes, vocabulary and objective.

    bert-jax prepare --input 'text/*.txt' --vocab CHECKPOINT --output=DATASET
    bert-jax pretrain --config=continue --workdir=runs/continued --config.init=CHECKPOINT --config.data.path=DATASET

CHECKPOINT is the output of `bert-jax import`, or a workdir. Its parameters are the start; the optimizer is fresh. The
losses before the first step are logged as step 0.

The peak rate of 1e-4 with bias correction, for batches of 256, is that of task-adaptive pre-training by Gururangan et
al. (2020, arXiv:2004.10964), and the warm-up of 6% is theirs, too; their domain-adaptive pre-training has 12,500 steps
of 2,048 sequences at 5e-4. Clinical BERT (Alsentzer et al. 2019, arXiv:1904.03323) has 150,000 steps of 32 sequences at
5e-5, and the README of google-research/bert proposes 2e-5. Use 5e-5 or less for batches of 32. Bias correction matters,
as the warm-up is short: see `optimizer.bias_correction`.

Parameters: those of the checkpoint.
Tokens: 409,600,000 (12,500 steps x 256 sequences x 128).
Hardware, time: not yet run at this size. `--dry_run` prints the hours of a device.
Score to expect: an MLM loss on the new domain below that of step 0.
"""

from ml_collections import ConfigDict

from bert_jax.configs import default


def get_config() -> ConfigDict:
    config = default.get_config()
    with config.ignore_type():
        for key, value in config.model.items():
            config.model[key] = "auto" if isinstance(value, (bool, str)) else -1
        config.objective.lm = config.objective.nsp = "auto"

    config.total_steps = 12_500
    config.optimizer.learning_rate = 1e-4
    config.optimizer.warmup_steps = 750  # 6%
    config.optimizer.bias_correction = True
    config.eval_at_start = True
    config.eval_every_steps = 1_000
    config.checkpoint.every_steps = 1_000
    return config
