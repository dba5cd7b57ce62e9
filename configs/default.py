"""Every key of pre-training once, with its unit. The other configs are what differs from this one.

These are the paper's values for BERT-BASE at sequence length 128 (Devlin et al. 2019, appendix A.2).
"""

import ml_collections


def get_config():
    config = ml_collections.ConfigDict()

    config.seed = 0  # of initialisation, data order, masks and dropout
    config.total_steps = 1_000_000  # optimizer steps
    config.global_batch_size = 256  # sequences a step, over all devices and microbatches
    config.gradient_accumulation = 1  # microbatches per step; -1: as many as max_rows_per_device requires
    config.max_rows_per_device = 0  # maximum rows of a microbatch per device, if gradient_accumulation=-1
    config.dtype = (
        "auto"  # of computation: float32, bfloat16, or auto (bfloat16 on TPU and GPU); parameters are float32
    )
    config.log_every_steps = 100
    config.eval_every_steps = 10_000  # 0: only at the end
    config.eval_batches = 64  # batches of global_batch_size sequences; -1: the whole eval split
    config.max_nonfinite_steps = 10  # updates skipped in a row for a non-finite loss or gradient before the run stops

    config.stall_minutes = 10.0  # without a step, before the watchdog dumps all thread stacks; 0: never
    config.stall_exit_minutes = 0.0  # without a step, before the run ends with status 1; 0: never

    # BertConfig, by the names of bert_config.json.
    config.model = ml_collections.ConfigDict()
    config.model.vocab_size = -1  # -1: the dataset's
    config.model.hidden_size = 768
    config.model.num_hidden_layers = 12
    config.model.num_attention_heads = 12
    config.model.intermediate_size = 3072
    config.model.hidden_act = "gelu"  # gelu: erf; gelu_new: tanh, as in Google's code
    config.model.hidden_dropout_prob = 0.1
    config.model.attention_probs_dropout_prob = 0.1
    config.model.max_position_embeddings = 512  # tokens
    config.model.type_vocab_size = 2
    config.model.initializer_range = 0.02
    config.model.layer_norm_eps = 1e-12

    config.objective = ml_collections.ConfigDict()
    config.objective.lm = "mlm"  # or ltr: every next token, under a causal mask; wants nsp=False
    config.objective.nsp = True  # False: no next-sentence loss
    config.objective.mask_rate = 0.15  # share of a sequence's tokens that are predicted
    config.objective.mask_token = 0.8  # of those, the share that becomes [MASK],
    config.objective.keep_token = 0.1  # that stays as it is,
    config.objective.random_token = 0.1  # and that becomes a random token; the three sum to 1
    config.objective.whole_word = False  # True: the pieces of a word are masked together
    config.objective.static_masks = 0  # k: only k different masks of each instance; 0: a new one every epoch

    config.data = ml_collections.ConfigDict()
    config.data.path = ""  # the folder of a prepared dataset, or several separated by commas
    config.data.weights = ()  # their shares in the rows, e.g. (0.8, 0.2); (): as their sizes
    config.data.seq_len = -1  # tokens a row; -1: as the dataset was prepared, and any other number has to be that
    config.data.max_predictions = -1  # of a sequence, at most; -1: round(objective.mask_rate * its length), at least 1
    config.data.packing = False  # True: several short sequences in one row, which see nothing of each other
    config.data.max_sequences = 8  # maximum per row, if packing

    config.optimizer = ml_collections.ConfigDict()
    config.optimizer.name = "adamw"  # or lamb, for batches of ten thousands
    config.optimizer.learning_rate = 1e-4  # at the end of the warm-up
    config.optimizer.warmup_steps = 10_000  # linear from 0
    config.optimizer.decay_power = 1.0  # then peak * (1 - step / total_steps) ** decay_power
    config.optimizer.weight_decay = 0.01  # not on biases and LayerNorms
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.999
    config.optimizer.eps = 1e-6
    config.optimizer.grad_clip_norm = 1.0  # global norm; 0: no clipping
    config.optimizer.bias_correction = False  # as in the reference's AdamW; True for LAMB, whose recipes have it
    config.optimizer.restart_schedule = False  # True: every phase has a warm-up and a decay of its own

    config.mesh = ml_collections.ConfigDict()  # devices along each axis; -1 fills in
    config.mesh.data = -1  # copies of the parameters
    config.mesh.fsdp = 1  # shards of parameters and optimizer state, along the hidden size
    config.mesh.tensor = 1  # shards of heads, feed-forward and vocabulary
    config.mesh.zero1 = False  # True: optimizer state is sharded along data as well, parameters are not (ZeRO stage 1)

    # How attention is computed: xla; or by a kernel that keeps no seq_len x seq_len array, and has no dropout
    # (model.attention_probs_dropout_prob=0.0): splash on TPU, cudnn on GPU.
    config.attention = "xla"
    # Rematerialization, recomputed in the backward pass: none, attention (its arrays of seq_len x seq_len), dots (all
    # but products with weights), full (all but each layer's input).
    config.remat = "none"
    config.gradient_reduce_dtype = "float32"  # of the gradient all-reduce; bfloat16 halves the traffic
    config.scan_layers = True  # False unrolls the layers: slower to compile, sometimes faster to run

    config.init = ""  # a checkpoint to start from: parameters only, fresh optimizer
    config.init_missing_heads = False  # True: heads that it lacks are initialised from the seed; False: refused
    config.phases = ()  # of dicts of overrides with their steps: ({"steps": 900_000, "data.path": "data128"}, ...)

    config.checkpoint = ml_collections.ConfigDict()
    config.checkpoint.every_steps = 5_000  # and at the end, and on SIGTERM
    config.checkpoint.keep = 3  # newest ones

    config.profile = ml_collections.ConfigDict()
    config.profile.steps = ""  # A:B traces steps A to B into WORKDIR/profile

    return config
