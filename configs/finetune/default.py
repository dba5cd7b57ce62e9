"""Every key of fine-tuning, once, with its unit, here or in `_common.py`. Other configs are differences from this one.

These are the paper's values (Devlin et al. 2019, section 4 and appendix A.3): batches of 32, three epochs, and as the
learning rate the best on dev of 5e-5, 4e-5, 3e-5 and 2e-5.
"""

import ml_collections

from bert_jax.configs import _common


def get_config():
    config = _common.get_config()

    config.init = ""  # The checkpoint to fine-tune: a workdir, one of its checkpoints/STEP, or what import wrote.
    config.from_scratch = False  # True: uses sizes and vocabulary of the checkpoint, and none of its parameters.
    config.num_epochs = 3  # Passes over the training examples.
    config.global_batch_size = 32  # Examples per step, over all devices and microbatches.
    config.gradient_accumulation = 1  # Microbatches per step.
    config.log_every_steps = 50  # Steps between logged rows of metrics.
    config.eval_batch_size = 64  # Examples, over all devices.
    # True: the result is the epoch with the best task.main_metric on the first scored split, of equals the earliest;
    # its checkpoint is kept beside the newest. False: the last epoch, as in the paper.
    config.keep_best = False

    config.early_stopping = ml_collections.ConfigDict()  # Requires keep_best. The learning rate is that of num_epochs.
    config.early_stopping.patience = 0  # Epochs without improvement, after which training ends; 0: any number.
    # A score improves if it is above that of the last improvement by more than this, in the unit of the metric.
    config.early_stopping.min_delta = 0.0

    config.data = ml_collections.ConfigDict()
    config.data.path = ""  # The task's folder.
    config.data.strict = False  # True: fail on a bad row; False: skip and count it.
    # Number of batches among which examples are sorted by length, which saves padding; 1: shuffled batches. Examples of
    # a length share sources and labels: 8 and 64 cost up to 0.03 of STS-B's Spearman correlation
    # (benchmarks/batch_order).
    config.data.sort_window = 1
    # True: pads batches to as few lengths as take the least time together with compiling a program for each; False: to
    # the next of 16, 32, 48, 64, 96, 128, 192, 256, 384 and 512 tokens.
    config.data.choose_lengths = True

    config.task = ml_collections.ConfigDict()
    config.task.kind = "text"  # glue, text, squad, choice or ner.
    config.task.name = ""  # glue: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli.
    # The metric that a search, keep_best and early_stopping compare, such as f1_macro; "": the task's own.
    config.task.main_metric = ""
    # glue, text and ner: weights of the classes in the loss: balanced, or by label as {'good': 1.0, 'bad': 2.5}, 1.0
    # for others. "": all 1.0.
    config.task.class_weights = ""
    config.task.max_seq_len = 128  # Tokens; longer texts are truncated.
    # The file to train on, in data.path; "": its usual name. text has no usual name: set a .csv, .tsv or .jsonl file.
    config.task.train = ""
    config.task.dev = ""  # The file to score on.
    config.task.test = ""  # The file to predict.
    config.task.text = ""  # text: field of the text; "": finds it.
    config.task.text_pair = ""  # text: field of a second text; "": none.
    config.task.label = "label"  # text: field of the label.
    config.task.positive_label = ""  # text: of two labels, the one that f1 is of; "": the one that sorts last.
    config.task.regression = False  # text: True if labels are numbers.
    config.task.version_2 = False  # squad: True for 2.0, where a question may have no answer.
    config.task.doc_stride = 128  # squad: tokens from the start of a paragraph's window to the start of the next.
    config.task.max_query_length = 64  # squad: maximum tokens of a question.
    config.task.n_best = 20  # squad: number of best starts and ends that are combined.
    config.task.max_answer_length = 30  # squad: maximum tokens of an answer.
    config.task.document_context = False  # ner: True reads a sentence with those around it in its document.
    config.task.word_column = 0  # ner: column of the word in a line, from 0.
    config.task.tag_column = -1  # ner: column of the tag; -1: the last.

    config.head = ml_collections.ConfigDict()
    config.head.dropout = 0.1  # Dropout of the output layer's input.
    config.head.bilstm = 0  # Units per direction of a randomly initialized BiLSTM below the output layer; 0: none.
    config.head.bilstm_layers = 1  # Layers of that BiLSTM, with the same dropout between them.
    # "": fine-tunes the encoder. Else freezes it, without dropout, and reads of its layers: embeddings, second_to_last,
    # last, sum_last_four, concat_last_four or sum_all; sums have learned weights.
    config.head.features = ""

    # The encoder's dropout rates are in `_common.py`; its other settings are the checkpoint's.

    config.optimizer.learning_rate = 2e-5  # Peak, at the end of the warm-up.
    config.optimizer.warmup_proportion = 0.1  # Share of all steps, linear from 0.

    config.checkpoint.every_steps = 1_000  # Steps; also saved at the end and on SIGTERM.
    config.checkpoint.keep = 1  # Newest checkpoints kept.

    config.search = ml_collections.ConfigDict()  # Several runs, each in a folder of its own in the workdir.
    config.search.learning_rates = ()  # Replaces optimizer.learning_rate: (5e-5, 4e-5, 3e-5, 2e-5) are the paper's.
    config.search.seeds = ()  # Replaces seed.
    return config
