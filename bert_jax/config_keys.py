"""Every key of pre-training, fine-tuning and studies, once: its type, its range, its default, and what it is.

Defaults are the paper's values: BERT-BASE at sequence length 128 (Devlin et al. 2019, appendix A.2), and for
fine-tuning (section 4 and appendix A.3) batches of 32, three epochs, and as the learning rate the best on dev of 5e-5,
4e-5, 3e-5 and 2e-5. `configs/` has the differences from them; `configs/bert.py` is the record of a run with them.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from bert_jax.errors import InputError
from bert_jax.sections import Must, Section, checked, flatten, with_values

Positive = Annotated[int, Must("at least 1", lambda x: x >= 1)]
PositiveOrOpen = Annotated[int, Must("at least 1, or -1", lambda x: x >= 1 or x == -1)]
NotNegative = Annotated[int, Must("at least 0", lambda x: x >= 0)]
NotNegativeNumber = Annotated[float, Must("a number of 0 or more", lambda x: 0 <= x < math.inf)]
PositiveNumber = Annotated[float, Must("above 0", lambda x: 0 < x < math.inf)]
Share = Annotated[float, Must("in [0, 1]", lambda x: 0 <= x <= 1)]
ShareBelow1 = Annotated[float, Must("in [0, 1)", lambda x: 0 <= x < 1)]
StepsOrShare = Annotated[
    float | int, Must("steps, or a share below 1", lambda x: 0 <= x < 2**31 and (x < 1 or x == int(x)))
]
Steps = Annotated[int, Must("in [1, 2**31)", lambda x: 1 <= x < 2**31)]
Seed = Annotated[int, Must("in [0, 2**31)", lambda x: 0 <= x < 2**31)]
BatchSize = Annotated[int, Must("at least 1", lambda x: x >= 1), Must(f"at most {1 << 20}", lambda x: x <= 1 << 20)]
Switch = bool | Literal["auto"]
Features = Literal["", "embeddings", "second_to_last", "last", "sum_last_four", "concat_last_four", "sum_all"]

# --- Keys that pre-training and fine-tuning share ----------------------------------------------------------------


class ModelKeys(Section):
    """Dropout rates; -1: as init, in pre-training."""

    hidden_dropout_prob: float = 0.1  # Dropout of embeddings and of the output of each sublayer.
    attention_probs_dropout_prob: float = 0.1  # Dropout of attention's weights.
    embedding_dropout: float | None = None  # Dropout of embeddings; None: hidden_dropout_prob.
    attention_output_dropout: float | None = None  # Dropout of attention's output; None: hidden_dropout_prob.
    mlp_dropout: float = 0.0  # Dropout of the activations within the feed-forward layer.


class OptimizerKeys(Section):
    """Optimizer and learning rate."""

    # adamw; lamb, for batches of ten thousands; stable_adamw, which limits the update of each tensor; muon, which
    # orthogonalizes the updates of the encoder's weights, with a momentum of 0.95, and has AdamW for all the rest.
    name: Literal["adamw", "lamb", "stable_adamw", "muon"] = "adamw"
    learning_rate: NotNegativeNumber = 1e-4  # Peak, at the end of the warm-up.
    # After the warm-up. linear and polynomial: peak * (1 - step / total_steps) ** p, with p = 1 in linear, so that they
    # start below the peak. cosine: half a cosine from the peak to 0. constant: the peak. wsd: the peak, then a decay to
    # 0 in the last decay_steps. A key that a schedule does not read is refused.
    schedule: Literal["linear", "polynomial", "constant", "wsd", "cosine"] = "linear"
    decay_power: PositiveNumber = 1.0  # polynomial: p.
    decay_steps: StepsOrShare = 0.2  # wsd: steps; below 1 a share of the schedule's steps, at least 1.
    # wsd: after a share x of the decay, the rate is peak * (1 - sqrt(x)), or with linear peak * (1 - x).
    decay_form: Literal["1-sqrt", "linear"] = "1-sqrt"
    weight_decay: NotNegativeNumber = 0.01  # Biases and LayerNorms have none.
    b1: ShareBelow1 = 0.9  # Decay of the mean of the gradients, per step.
    b2: ShareBelow1 = 0.999  # Decay of the mean of their squares, per step.
    eps: PositiveNumber = 1e-6  # Added to the root of the mean of the squares.
    grad_clip_norm: NotNegativeNumber = 1.0  # Global norm; 0: no clipping.
    # The reference's AdamW has no bias correction: its updates are up to 6.5 times those of torch's, 3 times after 100
    # steps and 1.3 times after 1,000. In a short run 2e-5 without it scores as 1e-4 with it: True needs higher rates.
    # LAMB's and Muon's recipes have it, and stable_adamw always.
    bias_correction: bool = False


class MeshKeys(Section):
    """Devices along each axis; -1 infers one of them."""

    data: int = -1  # Copies of the parameters.
    fsdp: int = 1  # Shards of parameters and optimizer state, along the hidden size.
    tensor: int = 1  # Shards of heads, feed-forward and vocabulary.
    # True: between steps, parameters and optimizer state are sharded along data too (ZeRO stage 1). auto: on TPUs.
    zero1: bool | Literal["auto"] = "auto"


def _are_first_and_last(steps: str) -> bool:
    match = re.fullmatch("([1-9][0-9]*):([0-9]+)", steps)
    return not steps or (match is not None and int(match[1]) <= int(match[2]))


class ProfileKeys(Section):
    """Profiler traces."""

    # A:B traces steps A to B into WORKDIR/profile.
    steps: Annotated[str, Must("FIRST:LAST, such as 10:15", _are_first_and_last)] = ""


class TrackingKeys(Section):
    """Trackers beside TensorBoard."""

    wandb_project: str = ""  # A project of Weights & Biases, which the run is logged to as well; "": none.


def _is_cache(setting: str) -> bool:
    return setting in ("auto", "none") or "/" in setting  # "off" would be a folder's name


class RunConfig(Section):
    """The keys of any run."""

    seed: Seed = 0  # Seeds new parameters, data order, masks and dropout.
    # Computes in float32, bfloat16, or auto: bfloat16 on TPU and GPU. Parameters are always float32. With float32, JAX
    # rounds the operands of products on TPU and GPU, unless JAX_DEFAULT_MATMUL_PRECISION=highest is set.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    gradient_accumulation: PositiveOrOpen = 1  # Microbatches per step.
    log_every_steps: Positive = 100  # Steps between logged rows of metrics.
    # Stops a run after so many skipped updates (non-finite loss or gradient) in a row.
    max_nonfinite_steps: Positive = 10
    # Keeps compiled programs, which later runs read: auto is ~/.cache/bert_jax/programs, or a folder in the workdir if
    # that is remote; none, or a folder. Who can write there can make its readers run code.
    compilation_cache: Annotated[str, Must("auto, none or a path (./programs)", _is_cache)] = "auto"
    # Minutes without a step before the watchdog dumps all thread stacks; 0: never.
    stall_minutes: Annotated[float, Must("a number of minutes, or 0", lambda x: 0 <= x < math.inf)] = 10.0
    stall_exit: bool = False  # True: the run then ends with status 1.
    model: ModelKeys = ModelKeys()
    mesh: MeshKeys = MeshKeys()  # Devices along each axis; -1 infers one of them.
    # Attention is xla, or a kernel that keeps no seq_len x seq_len array: pallas on TPU, with the dropout masks of xla;
    # splash on TPU, for long sequences and local layers, or cudnn on GPU, both without dropout
    # (model.attention_probs_dropout_prob=0.0).
    attention: Literal["xla", "pallas", "splash", "cudnn"] = "xla"
    # The backward pass recomputes none, attention (its arrays of seq_len x seq_len), dots (all but products with
    # weights), or full (all but each layer's input).
    remat: Literal["none", "attention", "dots", "full"] = "none"
    # Type in which gradients are reduced; bfloat16 halves the traffic.
    gradient_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    # True scans over the layers; False unrolls them, which compiles longer and is faster. auto unrolls up to 12 layers
    # on a CPU and 24 on a TPU without both fsdp and tensor, and scans otherwise.
    scan_layers: bool | Literal["auto"] = "auto"
    profile: ProfileKeys = ProfileKeys()
    tracking: TrackingKeys = TrackingKeys()


# --- Pre-training ------------------------------------------------------------------------------------------------


class PretrainModelKeys(ModelKeys):
    """BertConfig, by the names of bert_config.json. A number of -1, or auto, is that of init."""

    vocab_size: int = -1  # Pieces of the vocabulary; -1: as many as the dataset's has.
    hidden_size: int = 768  # Units of a token's state.
    num_hidden_layers: int = 12  # Layers of the encoder.
    num_attention_heads: int = 12  # Heads per layer; hidden_size is divisible by it.
    intermediate_size: int = 3072  # Units of the feed-forward layer.
    hidden_act: str = "gelu"  # gelu: erf; gelu_new: tanh, as in Google's code; auto: as init.
    max_position_embeddings: int = 512  # Maximum tokens of a sequence.
    type_vocab_size: int = 2  # Segments that have an embedding; 0: none, also for pairs.
    # Standard deviation of new weights, which are truncated at two of it.
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12  # Added to the variance in LayerNorm.
    position_embedding_type: str = "absolute"  # absolute: learned; rotary; auto: as init.
    global_rope_theta: float = 160_000.0  # Base of the rotary angles of global layers.
    local_rope_theta: float = 10_000.0  # Base of the rotary angles of local layers.
    # Layers from a global one to the next, from layer 0; those between are local. 1: all are global.
    global_attn_every_n_layers: int = 1
    local_attention: int = 128  # Tokens that a token of a local layer attends to, half of them on each side.
    pre_norm: Switch = False  # True: LayerNorm before each sublayer and after the last layer; False: after each.
    gated_mlp: Switch = False  # True: the feed-forward layer has a gate of intermediate_size, as GeGLU.
    attention_bias: Switch = True  # Biases of attention.
    mlp_bias: Switch = True  # Biases of the feed-forward layer.
    norm_bias: Switch = True  # Biases of LayerNorm.
    classifier_bias: Switch = True  # Bias of the masked-LM head's dense layer.
    decoder_bias: Switch = True  # Bias of the masked-LM head's output.
    # False: no pooler, requires objective.nsp=False; tasks then have the masked-LM head's dense layer and LayerNorm.
    pooler: Switch = True
    classifier_pooling: str = "cls"  # Tasks read the first token (cls) or the mean of all; auto: as init.
    # True: new weights that end a sublayer or a head have a smaller deviation, by sqrt(2 * num_hidden_layers).
    depth_scaled_init: Switch = False


class ObjectiveKeys(Section):
    """Objective of pre-training, and the masks of its tokens."""

    lm: Literal["mlm", "ltr", "auto"] = "mlm"  # ltr: every next token, causal, requires nsp=False; auto: as init.
    # False: no next-sentence loss; auto: as init, and False for datasets without pairs.
    nsp: bool | Literal["auto"] = True
    # Share of a sequence's tokens that are predicted.
    mask_rate: Annotated[float, Must("in (0, 1]", lambda x: 0 < x <= 1)] = 0.15
    mask_token: Share = 0.8  # Share of predicted tokens that become [MASK].
    keep_token: Share = 0.1  # Share of predicted tokens that stay as they are.
    random_token: Share = 0.1  # Share of predicted tokens that become a random one; the three sum to 1.
    whole_word: bool = False  # True: the pieces of a word are masked together.
    static_masks: NotNegative = 0  # k: each instance has only k different masks; 0: new ones every epoch.


def _ranges(text: str) -> list[tuple[int, int]]:
    pairs = [part.split(":") for part in text.split(",") if text]
    return [(int(first), int(last)) for first, last in pairs]


def _are_ranges(text: str) -> bool:
    """Returns whether a text is FIRST:LAST ranges of positive steps whose first steps ascend."""
    if not re.fullmatch(r"(\d{1,9}:\d{1,9}(,\d{1,9}:\d{1,9})*)?", text):
        return False
    firsts = [first for first, _ in _ranges(text)]
    return firsts == sorted({*firsts}) and all(1 <= first <= last for first, last in _ranges(text))


def _are_weights(weights: str | tuple[float, ...]) -> bool:
    return not isinstance(weights, str) or re.fullmatch(r"size\*\*(0|1|0?\.[0-9]+|1\.0+)", weights) is not None


class PretrainDataKeys(Section):
    """Prepared datasets and their rows."""

    path: str = ""  # The folder of a prepared dataset, or several, separated by commas.
    # Shares of the datasets in the rows, such as (0.8, 0.2), or size**0.7: proportional to a power of their sizes, from
    # 0 to 1; (): proportional to their sizes.
    weights: Annotated[str | tuple[float, ...], Must("numbers, or size**0.7", _are_weights)] = ()
    # Tokens per row; -1: as the dataset was prepared, which any other number must equal.
    seq_len: PositiveOrOpen = -1
    # Maximum predictions per sequence; -1: round(objective.mask_rate * its length), at least 1.
    max_predictions: PositiveOrOpen = -1
    packing: bool = False  # True: several short sequences share a row, and attend only to themselves.
    max_sequences: Positive = 8  # Maximum sequences per row, if packing.
    # Ranges FIRST:LAST, separated by commas, in ascending order of FIRST: leaves out the batches that steps FIRST to
    # LAST would train on, and step FIRST trains on the next. A range counts steps as the run does with those before it.
    skip_steps: Annotated[str, Must("FIRST:LAST in ascending order, such as 1000:1200,5000:5100", _are_ranges)] = ""

    def skipped(self) -> list[tuple[int, int]]:
        """Returns the (first, last) step of each range in `skip_steps`, by the first."""
        return _ranges(self.skip_steps)


class PretrainOptimizerKeys(OptimizerKeys):
    """Optimizer and learning rate."""

    # Steps, linear from 0; below 1 a share of the schedule's steps, rounded down.
    warmup_steps: StepsOrShare = 10_000
    restart_schedule: bool = False  # True: every phase has a warm-up and a decay of its own.


def _are_different_steps(steps: tuple[int, ...]) -> bool:
    return min(steps, default=0) >= 0 and len({*steps}) == len(steps)


class PretrainCheckpointKeys(Section):
    """Checkpoints."""

    every_steps: Positive = 5_000  # Steps; also saved at the end of each phase and on SIGTERM.
    keep: Positive = 3  # Newest checkpoints kept; milestones are never deleted.
    # Steps whose checkpoints are saved and never deleted, such as 0,512,1000; 0 is the initial state.
    milestones: Annotated[tuple[int, ...], Must("different steps of at least 0", _are_different_steps)] = ()
    milestone_every_steps: NotNegative = 0  # Steps: multiples are milestones, too, and 0 is one; 0: none.

    def is_milestone(self, step: int) -> bool:
        """Returns whether the checkpoint of `step` is saved and never deleted."""
        every = self.milestone_every_steps
        return step in self.milestones or (every > 0 and step % every == 0)


class PretrainTrackingKeys(TrackingKeys):
    """Trackers beside TensorBoard."""

    # Masked texts of the eval split whose fills each evaluation logs; 0: none. They are logged as text, also to W&B.
    samples: Annotated[int, Must("in [0, 64]", lambda x: 0 <= x <= 64)] = 3


class TargetKeys(Section):
    """Score that ends a run early."""

    # The run saves and ends with the first evaluation whose accuracy is at least, or whose loss is at most,
    # target.value; "": at total_steps.
    metric: Literal["", "loss", "mlm_loss", "mlm_accuracy", "ltr_loss", "ltr_accuracy", "nsp_loss", "nsp_accuracy"] = ""
    value: NotNegativeNumber = 0.0  # An accuracy as a share, a loss in nats.

    def is_reached(self, scores: Mapping[str, float]) -> bool:
        """Returns whether an evaluation with these scores ends the run."""
        score = scores.get(self.metric)
        if score is None:  # another objective's, or not finite in metrics.jsonl
            return False
        return score >= self.value if self.metric.endswith("accuracy") else score <= self.value


class PretrainConfig(RunConfig):
    """The keys of pre-training."""

    total_steps: Steps = 1_000_000  # Optimizer steps.
    global_batch_size: BatchSize = 256  # Sequences per step, over all devices and microbatches.
    # Microbatches per step; -1: as many as max_rows_per_device requires.
    gradient_accumulation: PositiveOrOpen = 1
    max_rows_per_device: NotNegative = 0  # Maximum rows of a microbatch per device, if gradient_accumulation=-1.
    eval_every_steps: NotNegative = 10_000  # Steps between evaluations; 0: only at the end of each phase.
    eval_at_start: bool = False  # True: also evaluates before the first step, as step 0.
    # Batches of global_batch_size sequences; -1: the whole eval split.
    eval_batches: Annotated[int, Must("at least -1", lambda x: x >= -1)] = 64
    target: TargetKeys = TargetKeys()
    model: PretrainModelKeys = PretrainModelKeys()
    objective: ObjectiveKeys = ObjectiveKeys()
    data: PretrainDataKeys = PretrainDataKeys()
    optimizer: PretrainOptimizerKeys = PretrainOptimizerKeys()
    # A checkpoint to initialize the parameters from; the optimizer is fresh. Keys of model that are -1 or auto have its
    # values, except model.vocab_size.
    init: str = ""
    init_missing_heads: bool = False  # True: heads missing there are initialized from the seed; False: refused.
    # Dicts of overrides with their steps: ({"steps": 900_000, "data.path": "data128"}, ...).
    phases: tuple[Mapping[str, object], ...] = ()
    # True: the new positions of a phase with longer rows than those before start as copies of the trained ones, as with
    # init; False: as random as they were.
    repeat_positions: bool = False
    checkpoint: PretrainCheckpointKeys = PretrainCheckpointKeys()
    tracking: PretrainTrackingKeys = PretrainTrackingKeys()

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = replace(self, phases=()) if self.phases else self
        phases = tuple(_typed_phase(f"phases.{number}", phase, whole) for number, phase in enumerate(self.phases))
        object.__setattr__(self, "phases", phases)

    def phase_steps(self) -> list[int]:
        """Returns the steps of each phase, those of -1 inferred; `total_steps` without phases.

        Raises InputError for steps that do not sum to `total_steps`.
        """
        given: list[Any] = [phase["steps"] for phase in self.phases] or [-1]
        rest = self.total_steps - sum(steps for steps in given if steps != -1)
        if given.count(-1) > 1 or not (rest > 0 if -1 in given else rest == 0):
            raise InputError(f"phases: steps {given} must sum to total_steps={self.total_steps}; use -1 in one phase")
        return [rest if steps == -1 else steps for steps in given]


def _typed_phase(name: str, phase: Mapping[str, object], whole: PretrainConfig) -> dict[str, object]:
    """Returns the values of a phase, each of the type of its key in the `whole` config."""
    try:
        typed = dict(flatten(with_values(whole, {key: value for key, value in phase.items() if key != "steps"})))
    except InputError as error:  # which begins with the key
        raise InputError(f"{name}.{error}") from error
    steps = checked(f"{name}.steps", PositiveOrOpen, phase.get("steps"))
    return {key: steps if key == "steps" else typed[key] for key in phase}


# --- Fine-tuning -------------------------------------------------------------------------------------------------


class FinetuneDataKeys(Section):
    """The task's files and their batches."""

    path: str = ""  # The task's folder.
    strict: bool = False  # True: fail on a bad row; False: skip and count it.
    # Number of batches among which examples are sorted by length, which saves padding, at a cost in some scores: those
    # of a length share sources and labels. 1: shuffled batches.
    sort_window: Positive = 1


class TaskKeys(Section):
    """The task."""

    kind: str = "text"  # glue, text, squad, choice or ner.
    name: str = ""  # glue: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli.
    # Tokens; longer texts are truncated. [CLS], a token of each text and [SEP] need 4.
    max_seq_len: Annotated[int, Must("at least 4", lambda x: x >= 4)] = 128
    # The file to train on, in data.path; "": its usual name. text has no usual name: set a .csv, .tsv or .jsonl file.
    train: str = ""
    dev: str = ""  # The file to score on.
    test: str = ""  # The file to predict.
    text: str = "text"  # text: field of the text.
    text_pair: str = ""  # text: field of a second text; "": none.
    label: str = "label"  # text: field of the label.
    regression: bool = False  # text: True if labels are numbers.
    version_2: bool = False  # squad: True for 2.0, where a question may have no answer.
    doc_stride: Positive = 128  # squad: tokens from the start of a paragraph's window to the start of the next.
    max_query_length: Positive = 64  # squad: maximum tokens of a question.
    n_best: Positive = 20  # squad: number of best starts and ends that are combined.
    max_answer_length: Positive = 30  # squad: maximum tokens of an answer.
    document_context: bool = False  # ner: True reads a sentence with those around it in its document.


class HeadKeys(Section):
    """Layers above the encoder."""

    dropout: ShareBelow1 = 0.1  # Dropout of the output layer's input.
    # Units per direction of a randomly initialized BiLSTM below the output layer; 0: none.
    bilstm: NotNegative = 0
    bilstm_layers: Positive = 1  # Layers of that BiLSTM, with the same dropout between them.
    # "": fine-tunes the encoder. Else freezes it, without dropout, and reads of its layers: embeddings, second_to_last,
    # last, sum_last_four, concat_last_four or sum_all; sums have learned weights.
    features: Features = ""


class FinetuneOptimizerKeys(OptimizerKeys):
    """Optimizer and learning rate."""

    learning_rate: NotNegativeNumber = 2e-5  # Peak, at the end of the warm-up.
    warmup_proportion: ShareBelow1 = 0.1  # Share of all steps, linear from 0.


class FinetuneCheckpointKeys(Section):
    """Checkpoints."""

    every_steps: Positive = 1_000  # Steps; also saved at the end and on SIGTERM.
    keep: Positive = 1  # Newest checkpoints kept.


class SearchKeys(Section):
    """Several runs, each in a folder of its own in the workdir."""

    # Replaces optimizer.learning_rate: (5e-5, 4e-5, 3e-5, 2e-5) are the paper's.
    learning_rates: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()  # Replaces seed.


class FinetuneConfig(RunConfig):
    """The keys of fine-tuning."""

    # The checkpoint to fine-tune: a workdir, one of its checkpoints/STEP, or what import wrote.
    init: str = ""
    # True: uses sizes and vocabulary of the checkpoint, and none of its parameters.
    from_scratch: bool = False
    num_epochs: Positive = 3  # Passes over the training examples.
    global_batch_size: BatchSize = 32  # Examples per step, over all devices and microbatches.
    gradient_accumulation: Positive = 1  # Microbatches per step.
    log_every_steps: Positive = 50  # Steps between logged rows of metrics.
    eval_batch_size: Positive = 64  # Examples, over all devices.
    data: FinetuneDataKeys = FinetuneDataKeys()
    task: TaskKeys = TaskKeys()
    head: HeadKeys = HeadKeys()
    optimizer: FinetuneOptimizerKeys = FinetuneOptimizerKeys()
    checkpoint: FinetuneCheckpointKeys = FinetuneCheckpointKeys()
    search: SearchKeys = SearchKeys()


# --- Studies -----------------------------------------------------------------------------------------------------


Name = Annotated[str, Must("a text with a letter or digit, since it names a folder", re.compile(r"[^\W_]").search)]


class StudyRow(Section):
    """A row of a study's table: an encoder."""

    name: Name = ""  # The row's name in the table.
    # Overrides of the study's `pretraining`; rows with the same overrides share one run.
    pretraining: Mapping[str, object] | None = None
    checkpoint: str = ""  # Instead of pretraining: base or large, of the study's `checkpoints`, or any checkpoint.
    config: str = ""  # A config of fine-tuning, instead of the tasks'.
    finetuning: Mapping[str, object] = field(default_factory=dict)  # Overrides of fine-tuning, for all tasks.
    tasks: tuple[str, ...] = ()  # Names of the tasks that it is fine-tuned on; (): all.
    paper: Mapping[str, float] = field(default_factory=dict)  # The paper's numbers, by column.


class StudyTask(Section):
    """A task that rows are fine-tuned on."""

    name: Name = ""  # The task's name.
    # A config of fine-tuning, as `--config` of finetune takes it, such as finetune/glue:sst2.
    config: Annotated[str, Must("a fine-tuning config, such as finetune/glue:sst2", bool)] = ""
    # Overrides of fine-tuning; its data.path is relative to the study's `task_data`.
    finetuning: Mapping[str, object] = field(default_factory=dict)
    # The table's columns and their scores, such as {"MNLI-m": "dev_matched/accuracy"}; by default one column, of the
    # task's name, with its main metric.
    columns: Mapping[str, str] = field(default_factory=dict)
    scale: float = 100.0  # Factor of the scores; 1 for scores that are percentages already, such as SQuAD's.

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", self.columns or {self.name: ""})


class StudyCheckpointKeys(Section):
    """Encoders that exist already."""

    base: str = ""  # A checkpoint of BERT-BASE.
    large: str = ""  # A checkpoint of BERT-LARGE.


class StudyConfig(Section):
    """The keys of a study: a table whose rows are encoders, pre-trained here or before.

    Its columns are scores of the tasks that each of them is fine-tuned on.
    """

    title: str = ""  # Title of the table.
    note: str = ""  # Text below the title, such as the metrics of the columns.
    pretraining: PretrainConfig = PretrainConfig()  # A whole config of pre-training, by default of BERT-BASE.
    checkpoints: StudyCheckpointKeys = StudyCheckpointKeys()  # Encoders that exist already.
    finetuning: Mapping[str, object] = field(default_factory=dict)  # Overrides of the fine-tuning of every task.
    task_data: str = ""  # Folder of the tasks' data.
    rows: tuple[StudyRow, ...] = ()  # `StudyRow`s, or dicts with their keys.
    tasks: tuple[StudyTask, ...] = ()  # `StudyTask`s, or dicts with their keys.
    # Seeds of pre-training: each row is pre-trained once for each of them, and compared with the first row over the
    # seeds; (): that of `pretraining`.
    pretraining_seeds: tuple[Seed, ...] = ()
    only_rows: tuple[str, ...] = ()  # Names of rows to run; (): all.
    only_tasks: tuple[str, ...] = ()  # Names of tasks to run; (): all.
    perplexity: bool = False  # True: a column with the perplexity of pre-training on held-out text.
