"""Ahead-of-time compilation of a config's training step for TPUs: memory, collectives and cost.

XLA's TPU compiler comes with libtpu and needs no TPU. It reports whether the step fits into a device's memory. The
compiled program lists the collectives between devices, for one chip or for thousands.

    bert-jax compile --config=bert_large --topology=v5e:16x16 --config.global_batch_size=8192
"""
