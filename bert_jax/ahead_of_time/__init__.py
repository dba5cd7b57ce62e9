"""Ahead-of-time compilation of a config's training step for TPUs: memory, collectives and time; the plan of a run.

XLA's compiler for TPUs comes with libtpu, and needs no TPU. The peak memory tells whether the step fits into a device.
The compiled program lists the collectives between devices, for one chip or for thousands, and XLA's estimate of the
time of each part.

    bert-jax compile --config=bert_large --topology=v5e:16x16 --config.global_batch_size=8192
"""
