"""Every key of fine-tuning once, with its unit. The other configs here are what differs from this one.

These are the paper's values (Devlin et al. 2019, section 4 and appendix A.3): batches of 32, three epochs, the learning
rate the best on dev of 5e-5, 4e-5, 3e-5 and 2e-5.
"""

import ml_collections


def get_config():
    config = ml_collections.ConfigDict()

    config.seed = 0  # of the output layer, data order and dropout
    config.init = ""  # the checkpoint to start from: a workdir, one of its checkpoints/STEP, or what import wrote
    config.from_scratch = False  # True: the checkpoint's sizes and vocabulary, and none of its parameters
    config.num_epochs = 3  # times through the training examples
    config.global_batch_size = 32  # examples a step, over all devices and microbatches
    config.gradient_accumulation = 1  # microbatches a step
    config.dtype = "auto"  # of computation: float32, bfloat16, or auto (bfloat16 on TPU and GPU)
    config.log_every_steps = 50
    config.eval_batch_size = 64  # examples, over all devices
    config.max_nonfinite_steps = 10  # updates skipped in a row for a non-finite loss or gradient before the run stops
    config.stall_minutes = 10.0  # without a step, before the watchdog dumps all thread stacks; 0: never
    config.stall_exit_minutes = 0.0  # without a step, before the run ends with status 1; 0: never

    config.data = ml_collections.ConfigDict()
    config.data.path = ""  # the task's folder
    config.data.strict = False  # True: fail on a bad row; False: skip and count it
    # Batches among which examples are sorted by length, which saves padding; 1: shuffled batches. Examples of a length
    # share sources and labels: 8 and 64 cost up to 0.03 of STS-B's Spearman correlation (benchmarks/batch_order).
    config.data.sort_window = 1

    config.task = ml_collections.ConfigDict()
    config.task.kind = "text"  # glue, text, squad, choice, ner
    config.task.name = ""  # of glue: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli
    config.task.max_seq_len = 128  # tokens; longer texts are cut
    config.task.train = (
        ""  # the file to train on, in data.path; "": by its usual name (text has none: .csv, .tsv, .jsonl)
    )
    config.task.dev = ""  # the file to score on
    config.task.test = ""  # the file to predict
    config.task.text = ""  # of text: the field of the text; "" finds it
    config.task.text_pair = ""  # of text: the field of a second text; "" is none
    config.task.label = "label"  # of text: the field of the label
    config.task.positive_label = ""  # of text: the label of two that f1 is of; "" is the one that sorts last
    config.task.regression = False  # of text: labels are numbers
    config.task.version_2 = False  # of squad: 2.0, where a question may have no answer
    config.task.doc_stride = 128  # of squad: tokens from a window of a paragraph to the next
    config.task.max_query_length = 64  # of squad: tokens of a question
    config.task.n_best = 20  # of squad: starts and ends that are combined
    config.task.max_answer_length = 30  # of squad: tokens
    config.task.document_context = False  # of ner: sentences are read with those around them in their document
    config.task.word_column = 0  # of ner: of the word in a line, from 0
    config.task.tag_column = -1  # of ner: of the tag; -1 is the last

    config.head = ml_collections.ConfigDict()
    config.head.dropout = 0.1  # of what the output layer reads
    config.head.bilstm = 0  # units, in each direction, of a randomly initialised BiLSTM under it; 0: none
    config.head.bilstm_layers = 1  # of that BiLSTM, with the same dropout between them
    # "": fine-tune the encoder. Freeze it, without dropout, and read of its layers: embeddings, second_to_last, last,
    # sum_last_four, concat_last_four, sum_all; sums have learned weights.
    config.head.features = ""

    # Of the encoder; all else of it is the checkpoint's.
    config.model = ml_collections.ConfigDict()
    config.model.hidden_dropout_prob = 0.1
    config.model.attention_probs_dropout_prob = 0.1

    config.optimizer = ml_collections.ConfigDict()
    config.optimizer.name = "adamw"  # or lamb
    config.optimizer.learning_rate = 2e-5  # at the end of the warm-up
    config.optimizer.warmup_proportion = 0.1  # of all steps, linear from 0
    config.optimizer.decay_power = 1.0  # then peak * (1 - step / total_steps) ** decay_power
    config.optimizer.weight_decay = 0.01  # not on biases and LayerNorms
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.999
    config.optimizer.eps = 1e-6
    config.optimizer.grad_clip_norm = 1.0  # global norm; 0: no clipping
    # The reference's AdamW has none: its updates are up to 6.5 times those of torch's, 3 times after 100 steps and 1.3
    # times after 1,000. In a short run 2e-5 without it scores as 1e-4 with it: True wants higher rates. LAMB wants it.
    config.optimizer.bias_correction = False

    config.mesh = ml_collections.ConfigDict()  # devices along each axis; -1 fills in
    config.mesh.data = -1
    config.mesh.fsdp = 1
    config.mesh.tensor = 1
    config.mesh.zero1 = False
    config.attention = "xla"  # or a kernel without dropout: splash on TPU, cudnn on GPU
    config.remat = "none"  # or attention, dots, full
    config.gradient_reduce_dtype = "float32"
    config.scan_layers = True

    config.checkpoint = ml_collections.ConfigDict()
    config.checkpoint.every_steps = 1_000  # and at the end, and on SIGTERM
    config.checkpoint.keep = 1  # newest ones

    config.search = ml_collections.ConfigDict()  # several runs, each in a folder of its own in the workdir
    config.search.learning_rates = ()  # instead of optimizer.learning_rate: (5e-5, 4e-5, 3e-5, 2e-5) are the paper's
    config.search.seeds = ()  # instead of seed

    config.profile = ml_collections.ConfigDict()
    config.profile.steps = ""  # A:B traces steps A to B into WORKDIR/profile

    return config
