"""BERT as Flax NNX modules that hold parameters and nothing else.

Keys, masks, determinism and the all-gather of a layer are arguments. Nothing here reads files or knows of training, and
meshes appear only in `workarounds.py`. Shapes use one alphabet:

    B rows    L positions    D hidden size    N heads    H head size    F feed-forward size
    V vocabulary (padded)    P predictions per row    K sequences per row
"""

from bert_jax.model.bert import BertForPreTraining, abstract_parameters, initialize, parameter_count
from bert_jax.model.bert_config import BertConfig

__all__ = ["BertConfig", "BertForPreTraining", "abstract_parameters", "initialize", "parameter_count"]
