"""Keys that pre-training and fine-tuning share, each once, with its unit. `default.py` of either adds its own."""

import ml_collections


def get_config():
    config = ml_collections.ConfigDict()

    config.seed = 0  # Seeds new parameters, data order, masks and dropout.
    # Computes in float32, bfloat16, or auto: bfloat16 on TPU and GPU. Parameters are always float32.
    config.dtype = "auto"
    config.max_nonfinite_steps = 10  # Stops a run after so many skipped updates (non-finite loss or gradient) in a row.
    # Keeps compiled programs, which later runs read: auto is ~/.cache/bert_jax/programs, or a folder in the workdir if
    # that is remote; none, or a folder. Who can write there can make its readers run code.
    config.compilation_cache = "auto"
    config.stall_minutes = 10.0  # Minutes without a step before the watchdog dumps all thread stacks; 0: never.
    config.stall_exit = False  # True: the run then ends with status 1.

    config.model = ml_collections.ConfigDict()
    config.model.hidden_dropout_prob = 0.1  # Dropout of embeddings and of the output of each sublayer.
    config.model.attention_probs_dropout_prob = 0.1  # Dropout of attention's weights.

    config.optimizer = ml_collections.ConfigDict()
    config.optimizer.name = "adamw"  # adamw, or lamb for batches of ten thousands.
    config.optimizer.decay_power = 1.0  # After the warm-up, the rate is peak * (1 - step / total_steps) ** decay_power.
    config.optimizer.weight_decay = 0.01  # Biases and LayerNorms have none.
    config.optimizer.b1 = 0.9  # Decay of the mean of the gradients, per step.
    config.optimizer.b2 = 0.999  # Decay of the mean of their squares, per step.
    config.optimizer.eps = 1e-6  # Added to the root of the mean of the squares.
    config.optimizer.grad_clip_norm = 1.0  # Global norm; 0: no clipping.
    # The reference's AdamW has no bias correction: its updates are up to 6.5 times those of torch's, 3 times after 100
    # steps and 1.3 times after 1,000. In a short run 2e-5 without it scores as 1e-4 with it: True needs higher rates.
    # LAMB's recipes have it.
    config.optimizer.bias_correction = False

    config.mesh = ml_collections.ConfigDict()  # Devices along each axis; -1 infers one of them.
    config.mesh.data = -1  # Copies of the parameters.
    config.mesh.fsdp = 1  # Shards of parameters and optimizer state, along the hidden size.
    config.mesh.tensor = 1  # Shards of heads, feed-forward and vocabulary.
    config.mesh.zero1 = False  # True: optimizer state, but not parameters, is sharded along data too (ZeRO stage 1).

    # Attention is xla, or a kernel that keeps no seq_len x seq_len array: pallas on TPU, with the dropout masks of xla,
    # or cudnn on GPU, without dropout (model.attention_probs_dropout_prob=0.0).
    config.attention = "xla"
    # The backward pass recomputes none, attention (its arrays of seq_len x seq_len), dots (all but products with
    # weights), or full (all but each layer's input).
    config.remat = "none"
    config.gradient_reduce_dtype = "float32"  # Type in which gradients are reduced; bfloat16 halves the traffic.
    # True scans over the layers; False unrolls them, which compiles longer and is faster on a CPU. auto unrolls up to
    # 12 layers on a CPU and scans otherwise.
    config.scan_layers = ml_collections.FieldReference("auto", field_type=object)

    config.checkpoint = ml_collections.ConfigDict()
    config.profile = ml_collections.ConfigDict()
    config.profile.steps = ""  # A:B traces steps A to B into WORKDIR/profile.

    config.tracking = ml_collections.ConfigDict()
    config.tracking.wandb_project = ""  # A project of Weights & Biases, which the run is logged to as well; "": none.
    config.tracking.wandb_entity = ""  # The user or team of the project; "": the login's default.
    return config
