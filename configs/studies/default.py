"""Every key of a study once. The other configs here are what differs from this one.

A study is a table: its rows are encoders, pre-trained here or before, its columns are scores of tasks that each of them
is fine-tuned on. `config.pretraining` is a whole config of pre-training, of BERT-BASE unless a study says otherwise.

A row is a dict with

name          what the table calls it
pretraining   what differs from `config.pretraining` in it: rows with the same differences share one run
checkpoint    in place of `pretraining`: base or large, a key of `config.checkpoints`
config        of fine-tuning, in place of the tasks'
finetuning    keys of fine-tuning that it sets for all tasks
tasks         names of those that it is fine-tuned on: all, unless it says so
paper         the paper's numbers, by column

and a task is a dict with

name          what the table calls it
config        of fine-tuning, as `--config` of finetune takes it
finetuning    keys of fine-tuning that it sets; its data.path lies in `config.task_data`
columns       what of its scores the table shows, as {"MNLI-m": "dev_matched/accuracy"}; by default its main metric
scale         what scores are multiplied with: 100 by default, and 1 where they are percentages already, as SQuAD's
"""

import ml_collections

from bert_jax.configs import bert


def get_config():
    config = ml_collections.ConfigDict()
    config.title = ""  # of the table
    config.note = ""  # what the reader has to know about the paper's numbers
    config.pretraining = bert.get_config()
    config.checkpoints = ml_collections.ConfigDict({"base": "", "large": ""})  # encoders that are there already
    config.task_data = ""  # the folder that tasks' data lie in
    config.rows = ()  # of dicts
    config.tasks = ()  # of dicts
    config.only_rows = ()  # names of rows, to leave out all others
    config.only_tasks = ()  # names of tasks
    config.perplexity = False  # True: a column with that of the pre-training on held-out text
    return config
