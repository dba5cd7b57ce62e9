"""Config of the long run: BERT-Tiny with the released uncased vocabulary, on 400 M tokens of English.

    benchmarks/long_run.sh

Three quarters of the tokens are in rows of 32, for the reason in `reference_cpu.py`. The learning rate is constant
until the last fifth of the steps, so that a run may end early: with a smaller total_steps, whose last fifth begins
after its newest checkpoint, it goes on as if it had never been meant to be longer. The positions that the rows of 128
add start as copies of the trained 32.
"""

from bert_jax.configs import bert_tiny

TOKENS_PER_STEP = 8_192
PHASES = {32: 300e6, 128: 100e6}
"""Tokens of each phase, by the tokens of a row."""


def get_config():
    config = bert_tiny.get_config()
    steps = {length: round(tokens / TOKENS_PER_STEP) for length, tokens in PHASES.items()}
    config.phases = (
        {"steps": steps[32], "data.path": "", "global_batch_size": TOKENS_PER_STEP // 32},
        {"steps": -1, "data.path": "", "global_batch_size": TOKENS_PER_STEP // 128},
    )
    config.total_steps = sum(steps.values())
    config.repeat_positions = True
    optimizer = config.optimizer
    optimizer.name, optimizer.learning_rate = "muon", 2e-3
    optimizer.b2 = 0.98
    optimizer.schedule = "wsd"
    optimizer.warmup_steps = 500
    config.eval_batches = 40
    config.checkpoint.every_steps = 500
    config.checkpoint.milestone_every_steps = 5_000
    return config
