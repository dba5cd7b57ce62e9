"""BERT-LARGE: 24 layers of 1024, 16 heads.

    bert-jax pretrain --config=bert_large --workdir=runs/bert_large --config.data.path=DATASET

With LAMB, as in NVIDIA's recipe (You et al. 2020): 7,038 steps of 65,536 sequences of 128, then 1,563 of 32,768 of 512.

    bert-jax pretrain --config=bert_large:lamb --workdir=runs/bert_large_lamb --config.gradient_accumulation=64 \\
      --config.phases.0.data.path=DATASET128 --config.phases.1.data.path=DATASET512
"""

from bert_jax.configs import default


def get_config(recipe=""):
    if recipe not in ("", "lamb"):
        raise ValueError(f"{recipe!r} is no recipe of it: there is lamb, or none for the paper's")
    config = default.get_config()
    config.model.num_hidden_layers = 24
    config.model.hidden_size = 1024
    config.model.num_attention_heads = 16
    config.model.intermediate_size = 4096
    if recipe == "lamb":
        _lamb(config)
    return config


def _lamb(config):
    config.optimizer.name = "lamb"
    config.optimizer.bias_correction = True
    config.optimizer.decay_power = 0.5
    config.optimizer.restart_schedule = True
    config.total_steps = 7_038 + 1_563
    config.global_batch_size = 65_536
    config.optimizer.learning_rate = 6e-3
    config.optimizer.warmup_steps = 2_001  # 28.43% of the first phase
    config.log_every_steps = 10
    config.eval_every_steps = 500
    config.eval_batches = 1
    config.checkpoint.every_steps = 500
    config.phases = (
        {"steps": 7_038, "data.path": "", "data.max_predictions": 20},
        {
            "steps": 1_563, "data.path": "", "data.max_predictions": 76, "global_batch_size": 32_768,
            "optimizer.learning_rate": 4e-3, "optimizer.warmup_steps": 200,  # 12.8%
        },
    )  # fmt: skip
