"""BERT-Tiny on the docstrings of Python packages, in minutes: short sequences first, then 128 tokens.

    bert-jax pretrain --config=quickstart --workdir=quickstart/run \\
        --config.phases.0.data.path=quickstart/data32 --config.phases.1.data.path=quickstart/data128

`launch/quickstart.sh` prepares both datasets and runs this.

Parameters: 777,090 with 4,096 pieces.
Tokens: 3,020,800 (4,500 steps x 16 sequences x 32, then 700 x 8 x 128).
Hardware, time: not yet timed on a quiet machine; made for four minutes on two CPU cores.
Score to expect: not yet measured.
"""

from bert_jax.configs import bert_tiny


def get_config():
    config = bert_tiny.get_config()
    config.model.hidden_act = "gelu_new"  # On a CPU, tanh is cheaper than erf.
    config.model.num_hidden_layers = 1  # Leaves the plateau in half of the CPU time that two layers need.
    config.model.num_attention_heads = 4
    config.model.max_position_embeddings = 128  # Tokens; no sequence is longer, so other positions stay random.

    config.optimizer.b2 = 0.98  # The second moment follows the gradients of the last 50 steps: the run is short.
    config.optimizer.warmup_steps = 200
    config.total_steps = 5_200
    # Word order is learned far sooner on 32 tokens than on 128; the learned parameters carry over.
    config.phases = (
        {"steps": 4_500, "data.path": "", "data.seq_len": 32, "log_every_steps": 100, "eval_every_steps": 1_500},
        {"steps": -1, "data.path": "", "data.seq_len": 128, "global_batch_size": 8},
    )
    config.log_every_steps = 50
    config.eval_every_steps = 300
    config.eval_batches = -1
    config.checkpoint.every_steps = 1_000
    return config
