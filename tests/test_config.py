import ast
import re
from pathlib import Path

import jax
import pytest
from support import helpers

from bert_jax import config_listing
from bert_jax.config import FinetuneConfig, StudyConfig, load_config
from bert_jax.config_keys import TargetKeys
from bert_jax.configs import ablations, bert
from bert_jax.data.loading.loader import predictions_per_row
from bert_jax.errors import InputError
from bert_jax.model import BertConfig, parameter_count
from bert_jax.sections import flatten, to_dict
from bert_jax.training.checks import check_config
from bert_jax.training.phases import make_masking, plan_phases

REPOSITORY = helpers.REPOSITORY
CONFIGS = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.py") if not path.stem.startswith("_"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_loads_by_name_and_by_path(name: str):
    by_name = load_config(name)
    by_path = load_config(str(REPOSITORY / "configs" / f"{name}.py"))
    assert by_name == by_path


def spelled_out(spec: str) -> str:
    """Returns the docstring of a config's file."""
    docstring = ast.get_docstring(ast.parse((REPOSITORY / "configs" / f"{spec}.py").read_text()), clean=False)
    assert docstring
    return docstring


def test_64_bits_are_refused():
    config = load_config("default", {"data.path": "data"})
    check_config(config, config.total_steps)
    with jax.enable_x64(True), pytest.raises(InputError, match="JAX_ENABLE_X64"):
        check_config(config, config.total_steps)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def parameters(spec: str, vocabulary: int = 30_522) -> int:
    return parameter_count(BertConfig.from_dict({**to_dict(load_config(spec).model), "vocab_size": vocabulary}))


def tokens(spec: str) -> int:
    """Returns steps x batch x length; a config without a length of its own is recorded at 128 tokens."""
    plans = [(plan.stop - plan.start, plan.config) for plan in plan_phases(load_config(spec))]
    lengths = [128 if config.data.seq_len == -1 else config.data.seq_len for _, config in plans]
    return sum(
        steps * config.global_batch_size * length for (steps, config), length in zip(plans, lengths, strict=True)
    )


def test_a_config_records_its_parameters():
    sizes = re.findall(r"^ +(\w+) +(\d+) +(\d+) +(\d+) +([\d,]+)$", spelled_out("bert"), re.M)
    assert [name for name, *_ in sizes] == list(bert.SIZES)
    for name, layers, hidden, heads, count in sizes:
        model = load_config(f"bert:{name}").model
        found = model.num_hidden_layers, model.hidden_size, model.num_attention_heads
        assert found == (int(layers), int(hidden), int(heads))
        assert parameters(f"bert:{name}") == number(count)
    rows = re.findall(r"^ +(L\w+) +([\d,]+)$", spelled_out("ablations"), re.M)
    assert [row for row, _ in rows] == list(ablations.TABLE_6)
    for row, count in rows:
        assert parameters(f"ablations:{row}") == number(count)
    for name in ("bert_tiny", "bert_large", "quickstart"):
        recorded = re.findall(r"([\d,]+) with ([\d,]+)\b", re.search(r"Parameters: (.*)", spelled_out(name))[1])
        assert recorded
        assert all(parameters(name, number(size)) == number(count) for count, size in recorded)


def test_a_size_is_a_config_by_its_name():
    for name in ("mini", "small", "medium", "base"):
        assert load_config(f"bert_{name}") == load_config(f"bert:{name}")
    assert to_dict(load_config("bert_base")) == to_dict(load_config("default"))
    with pytest.raises(InputError, match=r"config=bert_smal: .*\bbert_small\?"):
        load_config("bert_smal")


def test_the_defaults_are_the_papers():
    config = load_config("default")
    assert to_dict(config.optimizer) == {
        "name": "adamw", "learning_rate": 1e-4, "warmup_steps": 10_000, "schedule": "linear", "decay_power": 1.0,
        "decay_steps": 0.2, "decay_form": "1-sqrt", "weight_decay": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-6,
        "grad_clip_norm": 1.0, "bias_correction": False, "restart_schedule": False,
    }  # fmt: skip
    assert (config.global_batch_size, config.total_steps, config.data.max_predictions) == (256, 1_000_000, -1)
    model, objective = config.model, config.objective
    assert (model.hidden_dropout_prob, model.attention_probs_dropout_prob, model.layer_norm_eps) == (0.1, 0.1, 1e-12)
    assert (model.initializer_range, model.max_position_embeddings, model.type_vocab_size) == (0.02, 512, 2)
    assert model.hidden_act == "gelu"
    assert (objective.mask_rate, objective.mask_token, objective.keep_token, objective.random_token) == (
        0.15, 0.8, 0.1, 0.1
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "seq_len", "batch", "epochs", "dropout"),
    [("squad", 384, 32, 3, 0.0), ("squad:2.0", 384, 48, 2, 0.0), ("swag", 128, 16, 3, 0.1), ("ner", 128, 32, 3, 0.1)],
)
def test_fine_tuning_has_the_references_settings(name: str, seq_len: int, batch: int, epochs: int, dropout: float):
    config = load_config(f"finetune/{name}", kind=FinetuneConfig)
    assert (config.task.max_seq_len, config.global_batch_size, config.num_epochs) == (seq_len, batch, epochs)
    assert config.head.dropout == dropout
    assert (config.model.hidden_dropout_prob, config.model.attention_probs_dropout_prob) == (0.1, 0.1)


@pytest.mark.parametrize(
    ("name", "rate", "seq_len", "most"),
    [
        ("bert_base", 0.15, 128, 19), ("bert_base", 0.15, 512, 77), ("bert_base", 0.3, 128, 38),
        ("bert_base", 0.01, 32, 1), ("bert_large", 0.15, 512, 77), ("bert_large:v5p", 0.15, 128, 19),
    ],
)  # fmt: skip
def test_every_target_of_a_full_row_is_predicted_by_default(name: str, rate: float, seq_len: int, most: int):
    config = load_config(name, [("objective.mask_rate", str(rate))])
    assert {plan.config.data.max_predictions for plan in plan_phases(config)} == {-1}
    masking = make_masking(config)
    assert masking is not None
    assert predictions_per_row(masking, seq_len, 1) == masking.predictions(seq_len) == most


def test_the_lamb_recipe_is_nvidias():
    config = load_config("bert_large:lamb", [("phases.0.data.path", "a"), ("phases.1.data.path", "b")])
    first, second = (plan.config.optimizer for plan in plan_phases(config))
    assert [plan.config.data.max_predictions for plan in plan_phases(config)] == [20, 76]
    for phase, peak, steps, share in ((first, 6e-3, 7_038, 0.2843), (second, 4e-3, 1_563, 0.128)):
        assert (phase.name, phase.bias_correction, phase.restart_schedule) == ("lamb", True, True)
        assert (phase.schedule, phase.decay_power) == ("polynomial", 0.5)
        assert phase.learning_rate == peak
        assert phase.warmup_steps == pytest.approx(share * steps, abs=1)


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "tpu7x", "h200", "b200"])
@pytest.mark.parametrize("batches", [(256, 256), (65_536, 32_768)])
def test_tpu_recipes_have_published_batches_and_inferred_microbatches(chip, batches):
    paths = [("phases.0.data.path", "a"), ("phases.1.data.path", "b")]
    plans = plan_phases(load_config(f"bert_large:{'lamb_' if batches[0] > 256 else ''}{chip}", paths))
    for plan in plans:
        check_config(plan.config, plan.stop - plan.start)
    first, second = (plan.config for plan in plans)
    assert (first.global_batch_size, second.global_batch_size) == batches
    assert (first.data.seq_len, second.data.seq_len) == (128, 512)
    assert (first.attention, first.remat) == ("xla", "none")
    assert (second.attention, second.remat) == ("xla", "attention" if chip in ("h200", "b200") else "none")
    for phase, most in ((first, 512), (second, 128)):
        assert phase.gradient_accumulation == -1
        assert 16 <= phase.max_rows_per_device <= most
        assert phase.model.attention_probs_dropout_prob == 0.1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"decay_power": 0.5}, r"optimizer\.decay_power=0\.5: .*schedule=linear.* optimizer\.schedule=polynomial"),
        ({"schedule": "cosine", "decay_steps": 5}, r"optimizer\.decay_steps=5: .*schedule=cosine.* .*schedule=wsd"),
        ({"schedule": "constant", "decay_form": "linear"}, r"optimizer\.decay_form=linear: .*optimizer\.schedule=wsd"),
        ({"schedule": "wsd", "decay_steps": 31}, r"optimizer\.decay_steps=31: .*\b30 .*\b40 .*decay_steps=6$"),
        ({"schedule": "wsd", "decay_steps": 0}, r"optimizer\.decay_steps=0: 0 .*optimizer\.decay_steps=6$"),
        ({"schedule": "wsd", "warmup_steps": 0.9}, r"optimizer\.decay_steps=0\.2: 8 .*\b4 .*optimizer\.decay_steps=1$"),
        ({"schedule": "cosine", "warmup_steps": 40}, r"optimizer\.warmup_steps=40: .*total_steps=40\b"),
        ({"warmup_steps": 1.5}, r"optimizer\.warmup_steps=1\.5: must be steps, or a share"),
        ({"warmup_steps": -0.1}, r"optimizer\.warmup_steps=-0\.1: must be steps, or a share"),
    ],
)
def test_keys_that_do_not_fit_the_schedule_are_refused(keys: dict, message: str):
    overrides = {"total_steps": 40, "optimizer.warmup_steps": 10} | {f"optimizer.{k}": v for k, v in keys.items()}
    with pytest.raises(InputError, match=message) as error:
        check_config(load_config("default", overrides), 40)
    if fix := re.search(r"; set (optimizer\.\w+)=([^\s,]+)", str(error.value)):
        check_config(load_config("default", overrides | {fix[1]: fix[2]}), 40)


@pytest.mark.parametrize("kind", config_listing.CONFIG_TYPES)
def test_every_key_has_a_comment(kind: type):
    comments = config_listing.key_comments(kind)
    assert {key for key, _ in flatten(kind())} <= {*comments}
    assert comments.get("seed", comments.get("pretraining.seed", "")).startswith("Seeds ")


def test_the_mlperf_recipe_is_the_reference_convergence_point_of_256_sequences():
    config = load_config("bert_large:mlperf", [("data.path", "data"), ("init", "imported")])
    check_config(config, config.total_steps)
    (plan,) = plan_phases(config)
    recipe, schedule = config.optimizer, plan.schedule()
    assert (recipe.name, recipe.b1, recipe.b2, recipe.eps, recipe.weight_decay) == ("lamb", 0.9, 0.999, 1e-6, 0.01)
    assert [float(schedule(step)) for step in (0, 6_850, 13_700)] == pytest.approx([3.5e-4, 1.75e-4, 0])
    assert (config.global_batch_size, config.data.seq_len, config.data.max_predictions) == (256, 512, 76)
    assert tokens("bert_large:mlperf") == 13_700 * 256 * 512 == 1_795_686_400
    assert config.target == TargetKeys("mlm_accuracy", 0.72)
    assert 0 <= config.eval_batches * 256 - 10_000 < 256
    assert 0 <= config.eval_every_steps * 256 - 150_000 < 256
    assert config.model.hidden_act == "gelu_new"  # which `import` gives a TensorFlow checkpoint


def test_unknown_recipes_are_refused():
    with pytest.raises(InputError, match=r"lamb_v9.*v5e"):
        load_config("bert_large:lamb_v9")


@pytest.mark.parametrize(
    ("key", "hint"),
    [("optimizer.learning_rat", "optimizer.learning_rate"), ("hidden_size", "model.hidden_size"),
     ("warmup_steps", "optimizer.warmup_steps")],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, hint: str):
    with pytest.raises(InputError, match=rf"{key}: .*\b{hint}\b"):
        load_config("default", [(key, "1")])


def test_a_key_of_a_part_is_suggested_with_its_part():
    with pytest.raises(
        InputError, match=r"pretraining\.optimizer\.learning_rat: .*pretraining\.optimizer\.learning_rate"
    ):
        load_config("studies/table5", [("pretraining.optimizer.learning_rat", "1")], kind=StudyConfig)
    with pytest.raises(InputError, match=r"phases\.0\.learning_rat: .*\boptimizer\.learning_rate"):
        load_config("bert_large:v5e", [("phases.0.learning_rat", "1")])


def test_a_value_that_a_phase_does_not_take_over_is_refused():
    """The second phase of this config has a batch size and a learning rate of its own."""
    both = [("global_batch_size", "4096"), ("phases.1.global_batch_size", "2048")]
    assert [plan.config.global_batch_size for plan in plan_phases(load_config("bert_large:lamb", both))] == [4096, 2048]
    with pytest.raises(InputError, match=r"^global_batch_size: .* phase 1, .*=32768; set phases\.1\.global_batch"):
        load_config("bert_large:lamb", both[:1])
    with pytest.raises(InputError, match=r"^optimizer\.learning_rate: .* phase 1, "):
        load_config("bert_large:lamb", [*both, ("optimizer.learning_rate", "1e-3")])
    with pytest.raises(InputError, match=r"phases\.0\.stepz: "):
        load_config("default", [("phases", "({'stepz': 3},)")])
    with pytest.raises(InputError, match=r"text\.py: \w+: .*PretrainConfig"):
        load_config("finetune/text")


def test_an_override_that_a_phase_replaces_is_refused():
    with pytest.raises(InputError, match=r"^data\.path: .* phase 0, .*phases\.0\.data\.path"):
        load_config("bert_large:lamb_v5e", [("data.path", "c")])
    values = {"data.path": "c", "phases": ({"steps": -1, "data.path": "a"},)}
    assert load_config("default", values).data.path == "c"  # who gives the phases knows them


def test_files_that_are_not_configs_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"none\.py"):
        load_config(str(tmp_path / "none.py"))
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(InputError, match=r"empty\.py: .*get_config"):
        load_config(str(tmp_path / "empty.py"))
    with pytest.raises(InputError, match=r"bert_base:large: .*0 positional arguments"):
        load_config("bert_base:large")
    (tmp_path / "with_argument.py").write_text(
        "from bert_jax.configs import default\n\n\ndef get_config(arg='4'):\n    config = default.get_config()\n"
        "    config.model.num_hidden_layers = int(arg)\n    return config\n"
    )
    assert load_config(f"{tmp_path / 'with_argument.py'}:7").model.num_hidden_layers == 7
    for text, message in (
        ("def get_config(:\n", "SyntaxError"),
        ("import nothing_of_that_name\n", "ModuleNotFoundError"),
        ("def get_config():\n    raise KeyError('x')\n", "KeyError"),
        ("def get_config():\n    return None\n", "ConfigDict.*NoneType"),
        (
            "from bert_jax.configs import default\n\n\ndef get_config():\n    config = default.get_config()\n"
            "    config.total_stepz = 3\n    return config\n",
            r"total_stepz.*\btotal_steps\b",
        ),
    ):
        (tmp_path / "broken.py").write_text(text)
        with pytest.raises(InputError, match=message):
            load_config(str(tmp_path / "broken.py"))
    with pytest.raises(InputError, match=r"ValueError.*'x'"):
        load_config(f"{tmp_path / 'with_argument.py'}:x")
