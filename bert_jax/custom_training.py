"""The parts of a pre-training run, for a training loop of one's own.

    training = bert_jax.Training(bert_jax.load_config("bert_tiny", {"data.path": "data"}))
    state = training.initial_state()
    for step, batch in training.batches():
        state, metrics = training.step(state, batch)
    training.save("runs/own", state)

The batches, the state and the step are those of `bert_jax.pretrain` with the same config, to the bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cached_property

import jax

from bert_jax.batch import Batch
from bert_jax.config_keys import PretrainConfig
from bert_jax.data.loading.prefetch import Prefetch
from bert_jax.errors import InputError
from bert_jax.files import remote
from bert_jax.model.bert import HEADS
from bert_jax.parallel.host_batches import put_batch, rows_here
from bert_jax.parallel.mesh import make_mesh
from bert_jax.training.checkpoints import Checkpoint, check_place, save_parameters
from bert_jax.training.evaluation import Evaluator
from bert_jax.training.initialization import fill_in_from_checkpoint, initialize_from, open_init
from bert_jax.training.objectives import make_objective
from bert_jax.training.phases import open_phases
from bert_jax.training.pretrain import describe_inputs, plan_step
from bert_jax.training.state import TrainState, drop_parts
from bert_jax.training.train_step import Metrics


class Training:
    """Data, mesh, model, optimizer and jitted step of a config's run.

    Attributes:
      config: the run's config, with inferred values filled in.
      mesh: the `jax.sharding.Mesh` of `config.mesh`.
      model: the model's `BertConfig`.
      tokenizer: the tokenizer of the dataset.
    """

    def __init__(self, config: PretrainConfig, devices: Sequence[jax.Device] | None = None):
        """Opens the dataset of `config.data.path`, and plans the state and the step; allocates no parameters.

        `devices` are those of the mesh, by default all.

        Raises InputError if config, dataset and devices do not match, and for a config of several phases.
        """
        self.mesh = make_mesh(config.mesh, devices) if devices else make_mesh(config.mesh)
        self._phase, *others = open_phases(fill_in_from_checkpoint(config), self.mesh)
        if others:
            raise InputError(f"phases: expected one phase, got {1 + len(others)}; make a Training for each")
        phase = self._phase
        self.config, self.model, self.tokenizer = phase.config, phase.model, phase.datasets[0].tokenizer
        self._spec, self._step = plan_step(self.mesh, phase, self.model)
        self._init: Checkpoint | None = None

    def initial_state(self) -> TrainState:
        """Makes the state of step 0: from the checkpoint `config.init`, else at random from `config.seed`."""
        if not self.config.init:
            return self._spec.make()
        init = open_init([self._phase])
        self._init = init.checkpoint
        return initialize_from(init.checkpoint, self._spec, init.growth)

    def batches(self, start: int = 0) -> Iterator[tuple[int, Batch[jax.Array]]]:
        """Yields (step, batch) for the steps `start` + 1 to `config.total_steps`, prefetched by a thread.

        A batch is [A, B / A, ...], A microbatches of B / A rows, sharded over the mesh; see `Batch`.
        """
        config = self.config
        rows = rows_here(self.mesh, config.global_batch_size, config.gradient_accumulation)

        def make(step: int) -> Batch[jax.Array]:
            batch = self._phase.train_loader.batch(step, rows)
            return put_batch(self.mesh, batch, config.gradient_accumulation, batch_size=config.global_batch_size)

        with closing(Prefetch(make, start, config.total_steps)) as batches:
            yield from enumerate(batches, start + 1)

    def step(self, state: TrainState, batch: Batch[jax.Array]) -> tuple[TrainState, Metrics]:
        """Returns the state after one update, and its metrics as scalars on the device. `state` is donated.

        Metrics: `loss`, `mlm_loss`, `mlm_accuracy`, `nsp_loss`, `nsp_accuracy`, `learning_rate`, `grad_norm`,
        `nonfinite_steps`, `nonfinite_streak`; losses in nats.
        """
        with jax.set_mesh(self.mesh):
            return self._step(state, batch)

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Returns the losses on `config.eval_batches` of the eval split, as `pretrain` logs them.

        Raises InputError if the dataset has no eval split.
        """
        if not self._phase.eval_loader.batches:
            raise InputError(
                f"data.path={self.config.data.path}: no eval split, or eval_batches=0; nothing to evaluate"
            )
        with jax.set_mesh(self.mesh):
            return self._evaluator.run(state.parameters)

    @cached_property
    def _evaluator(self) -> Evaluator:
        spec, objective = self._spec, make_objective(self.config)
        return Evaluator(self.mesh, spec.graph, spec.shardings.parameters, self._phase.eval_loader, objective)

    def save(self, folder: str, state: TrainState) -> None:
        """Writes the parameters as a CHECKPOINT, for `bert_jax.load`, `finetune` and `export`; replaces `folder`.

        The optimizer's moments are not saved: such a checkpoint initializes a run, and resumes none. Neither is the
        next-sentence head if `config.objective.nsp` is False, because it is not trained.
        """
        target = remote.absolute(folder)
        check_place(target)
        untrained = () if self.config.objective.nsp else ("nsp_head",)
        parameters = drop_parts(untrained, state.parameters)
        save_parameters(
            target, parameters, bert_config=self.model, tokenizer=self.tokenizer,
            heads=[head for head in HEADS if head in parameters],
            inputs=describe_inputs([self._phase], self._init),
        )  # fmt: skip
