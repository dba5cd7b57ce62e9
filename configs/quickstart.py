"""BERT of one layer on the docstrings of Python packages, in sequences of 32 tokens; trains in minutes on a CPU.

    bert-jax pretrain --config=quickstart --workdir=quickstart/run --config.data.path=quickstart/data

`launch/quickstart.sh` prepares the dataset and runs this. `benchmarks/quickstart_recipes.py` compares other recipes.

Parameters: 500,610 with 2,048 pieces.
Tokens: 4,096,000 (8,000 steps x 16 sequences x 32).
Hardware, time: less than five minutes on two CPU cores, with the vocabulary, the dataset and the evaluation.
Score to expect: MLM loss 3.97 (unigram baseline 6.29), MLM accuracy 30.4%, NSP accuracy 63.7%.
"""

from ml_collections import ConfigDict

from bert_jax.configs import bert_tiny


def get_config() -> ConfigDict:
    config = bert_tiny.get_config()
    config.model.num_hidden_layers = 1  # The MLM loss falls sooner per CPU second than with two.
    config.model.num_attention_heads = 4
    config.model.hidden_act = "gelu_new"  # On a CPU, tanh is cheaper than erf.
    config.model.max_position_embeddings = 32  # Tokens; no sequence is longer.
    # More targets per step, and the loss leaves its first plateau in fewer. Evaluation masks 15%, as always.
    config.objective.mask_rate = 0.25
    config.data.seq_len = 32  # On longer sequences the plateau lasts far longer.

    config.optimizer.b2 = 0.98  # The second moment averages some 50 steps: the run is short.
    config.optimizer.warmup_steps = 200
    config.total_steps = 8_000
    config.log_every_steps = 100
    config.eval_every_steps = 1_000
    config.eval_batches = -1
    return config
