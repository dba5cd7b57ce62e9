"""SQuAD 1.1, or 2.0 as `finetune/squad:2.0`, from its official JSON.

    bert-jax finetune --config=finetune/squad --workdir=runs/squad --config.init=runs/base --config.data.path=squad

Hardware, time: not yet run with BERT-BASE. `benchmarks/small_study.sh` has run 12 articles of it with BERT-Tiny.
Score to expect: an F1 of 88.5 on the dev set of 1.1 with BERT-BASE, of 90.9 with BERT-LARGE (the paper's table 2).
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import default


def get_config(version: str = "1.1") -> ConfigDict:
    if version not in ("1.1", "2.0"):
        raise ValueError(f"{version!r}: unknown SQuAD version; expected 1.1 or 2.0")
    config = default.get_config()
    config.task.kind = "squad"
    config.task.version_2 = version == "2.0"
    config.task.max_seq_len = 384
    config.num_epochs = 2 if config.task.version_2 else 3
    config.global_batch_size = 48 if config.task.version_2 else 32
    config.optimizer.learning_rate = 5e-5
    config.head.dropout = 0.0  # As in the reference's run_squad.py.
    return config
