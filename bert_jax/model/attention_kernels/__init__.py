"""Attention kernels, which store no array of L x L: of Pallas for TPUs, of Triton and cuDNN for GPUs."""
