"""BERT of one layer on the docstrings of Python packages, in sequences of 32 tokens; trains in minutes on a CPU.

    bert-jax pretrain --config=quickstart --workdir=quickstart/run --config.data.path=quickstart/data

`launch/quickstart.sh` prepares the dataset and runs this. `benchmarks/quickstart.py` has measured it.

Parameters: 500,610 with 2,048 pieces.
Tokens: 3,584,000 (3,500 steps x 32 sequences x 32).
Hardware, time: less than five minutes on two CPU cores, with the vocabulary, the dataset and the evaluation.
Score to expect: MLM loss 3.61 (unigram baseline 6.29), MLM accuracy 34.7%, NSP accuracy 64.5%.
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
    config.objective.mask_rate = 0.4
    config.data.seq_len = 32  # On longer sequences the plateau lasts far longer.

    config.optimizer.name = "muon"  # To the same loss AdamW takes half as long again (benchmarks/speedrun.py).
    config.optimizer.learning_rate = 8e-3
    config.optimizer.b2 = 0.98  # The second moment averages some 50 steps: the run is short.
    config.optimizer.warmup_steps = 200
    config.global_batch_size = 32
    config.total_steps = 3_500
    config.log_every_steps = 100
    config.eval_every_steps = 500
    config.eval_batches = -1
    return config
