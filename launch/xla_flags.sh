#!/bin/sh
# Prints a named set of compiler flags for TPUs, for LIBTPU_INIT_ARGS:
#
#   flags=$(launch/xla_flags.sh async_all_gather) && export LIBTPU_INIT_ARGS="${LIBTPU_INIT_ARGS-} $flags"
#   bert-jax compile --config=bert_large:v6e --topology=v6e:4x4    # what it changes: memory, asynchronous collectives
#   bert-jax pretrain --config=bert_large:v6e ...
#
# Without a name, or with an unknown one, prints the names and exits with 2: `&&` keeps a wrong name from training
# without flags. The flags exist in libtpu 0.0.42; another version ends with "Unknown command line flag" if it lacks
# one. None is measured on a TPU.
set -eu

usage() {
  echo "Usage: xla_flags.sh async_all_gather|async_all_reduce|data_parallel|sparse_core" >&2
  exit 2
}

[ $# -eq 1 ] || usage
case $1 in
  async_all_gather) # all-gathers in pieces between the operations of a layer
    set -- \
      --xla_enable_async_all_gather=true \
      --xla_tpu_enable_async_collective_fusion=true \
      --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true \
      --xla_tpu_enable_async_collective_fusion_multiple_steps=true \
      --xla_tpu_overlap_compute_collective_tc=true
    ;;
  async_all_reduce) # all-reduces in pieces between other operations
    set -- \
      --xla_enable_async_all_reduce=true \
      --xla_tpu_enable_async_collective_fusion=true \
      --xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true
    ;;
  data_parallel) # all-reduces of gradients beside the rest of the backward pass
    set -- \
      --xla_tpu_enable_data_parallel_all_reduce_opt=true \
      --xla_tpu_data_parallel_opt_different_sized_ops=true
    ;;
  sparse_core) # collectives on sparse cores, which v5p, v6e and tpu7x have
    set -- \
      --xla_tpu_enable_sparse_core_collective_offload_all_gather=true \
      --xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true \
      --xla_tpu_enable_sparse_core_collective_offload_all_reduce=true
    ;;
  *) usage ;;
esac
echo "$*"
