"""A config's training step compiled for TPUs that are not there: its memory, its collectives and its cost.

XLA's TPU compiler comes with libtpu and needs no TPU. It says whether the step fits into a device's memory, and the
program that it makes says what the devices will send each other, for one chip or for thousands.

    bert-jax compile --config=bert_large --topology=v5e:16x16 --config.global_batch_size=8192
"""
