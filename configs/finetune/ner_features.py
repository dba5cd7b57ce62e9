"""Named entities by the feature-based approach (the paper's section 5.3): a BiLSTM on what a frozen encoder gives.

    bert-jax finetune --config=finetune/ner_features:concat_last_four --workdir=runs/ner_features \\
      --config.init=runs/base_cased --config.data.path=conll2003 --config.task.document_context=True

The argument is one of the paper's six ways to take features.

Hardware, time: not yet run.
Score to expect: an F1 on the dev set of CoNLL-2003, of BERT-BASE (the paper's table 7; 96.4 if fine-tuned as a whole):

    embeddings 91.0   second_to_last 95.6   last 94.9   sum_last_four 95.9   concat_last_four 96.1   sum_all 95.5

The paper gives only the size of the tagger, 2 layers of 768. Adam's rate and the dropout here are those of the tagger
on features of Peters et al. 2018 (arXiv:1802.05365), which also has a CRF.
"""

from ml_collections import ConfigDict

from bert_jax.configs.finetune import default


def get_config(features: str = "concat_last_four") -> ConfigDict:
    config = default.get_config()
    config.task.kind = "ner"
    config.head.features = features
    config.head.bilstm = 768
    config.head.bilstm_layers = 2
    config.head.dropout = 0.5
    config.num_epochs = 10
    config.optimizer.learning_rate = 1e-3
    config.optimizer.bias_correction = True
    return config
