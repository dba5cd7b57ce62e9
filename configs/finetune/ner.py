"""Named entities, from CoNLL files in any of the schemes IOB1, BIO and BIOES. Cased models do better.

    bert-jax finetune --config=finetune/ner --workdir=runs/ner --config.init=runs/base_cased \\
      --config.data.path=conll2003 --config.task.document_context=True

Hardware, time: not yet run with BERT-BASE. `benchmarks/small_study.sh` has run WNUT-17 with BERT-Tiny.
Score to expect: an F1 of 96.4 on the dev set of CoNLL-2003 and 92.4 on its test set (BERT-BASE, the paper's table 7).
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import default


def get_config() -> ConfigDict:
    config = default.get_config()
    config.task.kind = "ner"
    config.optimizer.learning_rate = 5e-5
    return config
