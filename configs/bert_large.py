"""BERT-LARGE: 24 layers of 1024, 16 heads.

    bert-jax pretrain --config=bert_large --workdir=runs/bert_large --config.data.path=DATASET

With LAMB, as in NVIDIA's recipe (You et al. 2020):

    bert-jax pretrain --config=bert_large:lamb --workdir=runs/bert_large_lamb --config.gradient_accumulation=64 \\
      --config.phases.0.data.path=DATASET128 --config.phases.1.data.path=DATASET512

On TPUs (`v4`, `v5e`, `v5p`, `v6e`, `tpu7x`) and on GPUs (`a100`, `h100`, `h200`, `b200`, `gb200`): the paper's million
steps, 90% of them at 128 tokens, or LAMB's as `lamb_v5p`. The rows of a microbatch fit by the memory of the compiled
step; no recipe has been run. The recipe is the same on any number of chips that divides the batch: microbatches are
inferred.

    bert-jax pretrain --config=bert_large:v5p --workdir=runs/bert_large \\
      --config.phases.0.data.path=DATASET128 --config.phases.1.data.path=DATASET512

MLPerf Training's benchmark continues MLPerf's checkpoint at 512 tokens and stops at a masked-LM accuracy of 0.720. Its
values are those of MLPerf's reference convergence point for 256 sequences (mlcommons/logging, `rcps_bert.json`);
docs/guides/mlperf.md has the data, the checkpoint, what differs from a submission, and the values of other batches:

    bert-jax pretrain --config=bert_large:mlperf --workdir=runs/mlperf --config.data.path=DATASET \\
      --config.init=IMPORTED

Parameters: 336,226,108 with 30,522 pieces.

    recipe            tokens  steps x sequences x sequence length
    (none)    32,768,000,000  1,000,000 x 256 x 128
    v5p       42,598,400,000  900,000 x 256 x 128, then 100,000 x 256 x 512; the same for all other chips
    lamb      85,261,811,712  7,038 x 65,536 x 128, then 1,563 x 32,768 x 512; the same for lamb_v4 and so on
    mlperf     1,795,686,400  13,700 x 256 x 512 at most; the reference stopped after 8,722 to 11,466 steps

Hardware, time: not yet run. docs/numbers/performance.md has what `bert-jax compile` computes ahead of time: the memory
and time of a step on 256 and 1,024 TPU chips, and the hours of a phase.
Score to expect: an MLM loss of 1.17 (perplexity 3.23, the paper's table 6); with LAMB, 1.265 +- 0.023 in NVIDIA's
DeepLearningExamples, probably with NSP's loss.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict

from bert_jax.configs import bert

# Rows of a microbatch on a device, at 128 tokens and at 512, with room to spare (benchmarks/tpu_time.py), data
# parallel: the model is too small to gain from sharding it. At 512 tokens all arrays of attention fit on a TPU, whose
# state is sharded; on a GPU they are recomputed.
CHIPS = {"v4": (128, 32), "v5e": (64, 16), "v5p": (256, 128), "v6e": (128, 32)}
# A device of TPU7x, half a chip, has as much memory as v5p.
CHIPS["tpu7x"] = CHIPS["v5p"]
# A run can use 75% of a GPU's memory: 59 GiB of an A100 or H100; the others have more.
GPUS = {**dict.fromkeys(("a100", "h100"), (256, 64)), **dict.fromkeys(("h200", "b200", "gb200"), (512, 128))}
CHIPS |= GPUS


def get_config(recipe: str = "") -> ConfigDict:
    is_lamb = recipe.split("_")[0] == "lamb"
    chip = recipe.removeprefix("lamb").removeprefix("_") if is_lamb else recipe
    if recipe not in ("", "lamb", "mlperf", *CHIPS, *(f"lamb_{name}" for name in CHIPS)):
        raise ValueError(
            f"{recipe!r}: unknown recipe; expected lamb, mlperf, {', '.join(CHIPS)}, lamb_v4 and so on, or none for "
            "the paper's"
        )
    config = bert.get_config("large")
    if recipe == "mlperf":
        return _mlperf(config)
    if is_lamb:
        _lamb(config)
    elif chip:
        config.phases = (
            {"steps": 900_000, "data.path": "", "data.seq_len": 128},
            {"steps": 100_000, "data.path": "", "data.seq_len": 512},
        )
    if chip:
        _on_chip(config, *CHIPS[chip], {"remat": "attention"} if chip in GPUS else {})
    return config


def _lamb(config: ConfigDict) -> None:
    config.optimizer.name = "lamb"
    config.optimizer.bias_correction = True
    config.optimizer.schedule = "polynomial"
    config.optimizer.decay_power = 0.5
    config.optimizer.restart_schedule = True
    config.total_steps = 7_038 + 1_563
    config.global_batch_size = 65_536
    config.optimizer.learning_rate = 6e-3
    config.optimizer.warmup_steps = 2_001  # 28.43% of the first phase.
    config.log_every_steps = 10
    config.eval_every_steps = 500
    config.eval_batches = 1
    config.checkpoint.every_steps = 500
    config.phases = (
        {"steps": 7_038, "data.path": "", "data.seq_len": 128, "data.max_predictions": 20},
        {
            "steps": 1_563, "data.path": "", "data.seq_len": 512, "data.max_predictions": 76,
            "global_batch_size": 32_768, "optimizer.learning_rate": 4e-3,
            "optimizer.warmup_steps": 200,  # 12.8% of the phase.
        },
    )  # fmt: skip


def _mlperf(config: ConfigDict) -> ConfigDict:
    config.model.hidden_act = "gelu_new"  # As in the code that wrote the checkpoint.
    config.optimizer.name = "lamb"
    config.optimizer.bias_correction = True
    config.optimizer.learning_rate = 3.5e-4
    config.optimizer.warmup_steps = 0
    config.total_steps = 13_700
    config.gradient_accumulation = -1
    config.max_rows_per_device = CHIPS["v5e"][1]  # The smallest memory.
    config.data.seq_len = 512
    config.data.max_predictions = 76
    config.target.metric = "mlm_accuracy"
    config.target.value = 0.72
    config.eval_every_steps = 586  # The first step after MLPerf's 150,000 sequences.
    config.eval_batches = 40  # The fewest with MLPerf's 10,000 sequences.
    config.log_every_steps = 10
    config.checkpoint.every_steps = 586
    return config


def _on_chip(config: ConfigDict, rows_of_128: int, rows_of_512: int, attention_of_512: Mapping[str, str]) -> None:
    first, second = config.phases
    config.gradient_accumulation = -1
    config.phases = (
        {**first, "max_rows_per_device": rows_of_128},
        {**second, "max_rows_per_device": rows_of_512, **attention_of_512},
    )
