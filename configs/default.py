"""Every key of pre-training, once, with its unit, here or in `_common.py`. Other configs are differences from this one.

    bert-jax pretrain --config=default --workdir=runs/bert_base --config.data.path=DATASET

The values are the paper's for BERT-BASE at sequence length 128 (Devlin et al. 2019, appendix A.2); `bert.py` is the
record of that run.
"""

import ml_collections

from bert_jax.configs import _common


def get_config():
    config = _common.get_config()

    config.total_steps = 1_000_000  # Optimizer steps.
    config.global_batch_size = 256  # Sequences per step, over all devices and microbatches.
    config.gradient_accumulation = 1  # Microbatches per step; -1: as many as max_rows_per_device requires.
    config.max_rows_per_device = 0  # Maximum rows of a microbatch per device, if gradient_accumulation=-1.
    config.log_every_steps = 100  # Steps between logged rows of metrics.
    config.eval_every_steps = 10_000  # Steps between evaluations; 0: only at the end.
    config.eval_at_start = False  # True: also evaluates before the first step, as step 0.
    # A prepared dataset of the old domain, which each evaluation scores as well, as old_mlm_loss and so on; "": none.
    config.eval_old_data = ""
    config.eval_batches = 64  # Batches of global_batch_size sequences; -1: the whole eval split.

    # BertConfig, by the names of bert_config.json; both dropout rates are in `_common.py`.
    config.model.vocab_size = -1  # Pieces of the vocabulary; -1: as many as the dataset's has.
    config.model.hidden_size = 768  # Units of a token's state.
    config.model.num_hidden_layers = 12  # Layers of the encoder.
    config.model.num_attention_heads = 12  # Heads per layer; hidden_size is divisible by it.
    config.model.intermediate_size = 3072  # Units of the feed-forward layer.
    config.model.hidden_act = "gelu"  # gelu: erf; gelu_new: tanh, as in Google's code; auto: as init.
    config.model.max_position_embeddings = 512  # Maximum tokens of a sequence.
    config.model.type_vocab_size = 2  # Segments that have an embedding.
    config.model.initializer_range = 0.02  # Standard deviation of new weights, which are truncated at two of it.
    config.model.layer_norm_eps = 1e-12  # Added to the variance in LayerNorm.

    config.objective = ml_collections.ConfigDict()
    config.objective.lm = "mlm"  # mlm; ltr: every next token, causal, requires nsp=False; auto: as init.
    config.objective.nsp = True  # False: no next-sentence loss; auto: as init, and False for datasets without pairs.
    config.objective.mask_rate = 0.15  # Share of a sequence's tokens that are predicted.
    config.objective.mask_token = 0.8  # Share of predicted tokens that become [MASK].
    config.objective.keep_token = 0.1  # Share of predicted tokens that stay as they are.
    config.objective.random_token = 0.1  # Share of predicted tokens that become a random one; the three sum to 1.
    config.objective.whole_word = False  # True: the pieces of a word are masked together.
    config.objective.static_masks = 0  # k: each instance has only k different masks; 0: new ones every epoch.

    config.data = ml_collections.ConfigDict()
    config.data.path = ""  # The folder of a prepared dataset, or several, separated by commas.
    config.data.weights = ()  # Shares of the datasets in the rows, such as (0.8, 0.2); (): proportional to their sizes.
    config.data.seq_len = -1  # Tokens per row; -1: as the dataset was prepared, which any other number must equal.
    # Maximum predictions per sequence; -1: round(objective.mask_rate * its length), at least 1.
    config.data.max_predictions = -1
    config.data.packing = False  # True: several short sequences share a row, and attend only to themselves.
    config.data.max_sequences = 8  # Maximum sequences per row, if packing.

    config.optimizer.learning_rate = 1e-4  # Peak, at the end of the warm-up.
    config.optimizer.warmup_steps = 10_000  # Steps, linear from 0.
    config.optimizer.restart_schedule = False  # True: every phase has a warm-up and a decay of its own.

    # A checkpoint to initialize the parameters from; the optimizer is fresh. Keys of model that are -1 or auto have its
    # values, except model.vocab_size.
    config.init = ""
    config.init_missing_heads = False  # True: heads missing there are initialized from the seed; False: refused.
    # Dicts of overrides with their steps: ({"steps": 900_000, "data.path": "data128"}, ...).
    config.phases = ()

    config.checkpoint.every_steps = 5_000  # Steps; also saved at the end and on SIGTERM.
    config.checkpoint.keep = 3  # Newest checkpoints kept, beside the milestones.
    # Steps whose checkpoints are saved and never deleted, such as 0,512,1000; 0 is the initial state.
    config.checkpoint.milestones = ()
    config.checkpoint.milestone_every_steps = 0  # Steps: multiples are milestones, too, and 0 is one; 0: none.

    # Masked texts of the eval split whose fills each evaluation logs; 0: none. They are logged as text, also to W&B.
    config.tracking.samples = 3
    return config
