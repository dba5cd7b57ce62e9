"""The commands as a person types them: one journey through all of them, and what bad input gets."""

import contextlib
import inspect
import io
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from support import child_processes, helpers

import bert_jax
import bert_jax.inference.pretrained
from bert_jax import cli
from bert_jax.command_line import arguments as module
from bert_jax.command_line.arguments import COMMANDS
from bert_jax.commands import Result
from bert_jax.errors import InputError
from bert_jax.text.tokenizer import read_tokenizer

SHORT = {
    "model.num_hidden_layers": 1, "model.hidden_size": 32, "model.num_attention_heads": 2,
    "model.intermediate_size": 64, "model.max_position_embeddings": 64, "data.max_predictions": 10, "total_steps": 4,
    "global_batch_size": 16, "log_every_steps": 2, "eval_every_steps": 4, "eval_batches": -1,
    "checkpoint.every_steps": 4, "optimizer.warmup_steps": 2, "optimizer.learning_rate": 1e-2,
}  # fmt: skip


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw text, vocabulary, dataset and a trained model, each made by its command."""
    folder = tmp_path_factory.mktemp("journey")
    (folder / "corpus.txt").write_text(helpers.make_corpus(documents=400))
    commands = [
        ("vocab", "--input", folder / "*.txt", "--output", folder / "vocab.json", "--size", 200),
        ("prepare", "--input", folder / "corpus.txt", "--vocab", folder / "vocab.json", "--output", folder / "data",
         "--seq_len", 64, "--eval_fraction", 0.1, "--workers", 2),
        ("pretrain", "--config=bert_tiny", "--workdir", folder / "run", f"--config.data.path={folder / 'data'}",
         *helpers.flags(SHORT)),
    ]  # fmt: skip
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stderr):
        for command in commands:
            assert cli.main([str(word) for word in command]) == 0
    (folder / "stderr").write_text(stderr.getvalue())
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_that_parse(name: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    examples = re.findall(r"^  bert-jax (.+)$", text.partition("\nExamples:\n")[2], re.M)
    assert examples
    for example in examples:
        assert cli.parse(shlex.split(example.partition(" > ")[0])).command == name
    assert re.search(r"^Reads: .+\nWrites: ", text, re.M)


def test_configs_prints_keys_with_values_and_comments(capsys: pytest.CaptureFixture):
    assert cli.main(["configs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bert_tiny"].startswith("BERT-Tiny")
    assert cli.main(["configs", "finetune/glue:sst2"]) == 0
    assert re.search(r"^seed = \d+  # Seeds ", capsys.readouterr().out, re.M)
    assert cli.main(["configs", "studies/table5", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    assert keys["pretraining.total_steps"]["value"] == 1_000_000
    assert keys["pretraining.total_steps"]["comment"]
    assert cli.main(["configs", "bert_tinny"]) == 2


@pytest.mark.parametrize(
    ("folder", "lines", "key"),
    [
        ("finetune", "config.num_epochs = 7", "num_epochs = 7"),
        ("studies", "config.finetuning = {'optimizer.learning_rate': 1e-4}", "finetuning = {'optimizer.learning_rate'"),
        (
            "",
            "config.optimizer.warmup_steps = 0.06; config.data.weights = 'size**0.7'",
            "optimizer.warmup_steps = 0.06",
        ),
    ],
)
def test_ones_own_config_of_any_type_sets_what_the_command_line_can(
    folder: str, lines: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    place = f"configs.{folder}" if folder else "configs"
    (tmp_path / "mine.py").write_text(
        f"from bert_jax.{place} import default\n\ndef get_config():\n    config = default.get_config()\n"
        f"    {lines}\n    return config\n"
    )
    assert cli.main(["configs", str(tmp_path / "mine.py")]) == 0
    assert f"\n{key}" in capsys.readouterr().out


def test_a_result_prints_as_its_command():
    assert str(Result({"a": 1.5}, "the text")) == "the text"
    assert json.loads(str(Result({"a": 1.5}))) == {"a": 1.5}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion_knows_commands_and_configs(shell: str, capsys: pytest.CaptureFixture):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("fill-mask", "workdir", "bert_tiny", "finetune/squad"):
        assert word in script


def test_completion_of_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture):
    cli.main(["completion", "bash"])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    code = (
        f"source {tmp_path / 'script'}; COMP_WORDS=(bert-jax pretrain --config bert_t); COMP_CWORD=3; "
        "_shtab_bert_jax; echo ${COMPREPLY[@]}"
    )
    assert child_processes.run(["bash", "-c", code], timeout=60).stdout.split() == ["bert_tiny"]


def results(command: list[object], capsys: pytest.CaptureFixture) -> dict:
    """The JSON document that a command prints with --json and --quiet; nothing else is on stdout or stderr."""
    capsys.readouterr()
    assert cli.main([*map(str, command), "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_home_folder_is_found_after_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = cli.parse(
        ["pretrain", "--config=bert_tiny", "--workdir=~/runs/x", "--config.data.path=~/data", "--config.init=a~b"]
    )
    assert options.workdir == f"{tmp_path}/runs/x"
    assert options.overrides == [("data.path", f"{tmp_path}/data"), ("init", "a~b")]
    assert cli.parse(["fill-mask", "--checkpoint=~", "~/is a [MASK]"]).checkpoint == str(tmp_path)


def test_json_is_the_only_output(journey: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    run, data, corpus = journey / "run", journey / "data", journey / "corpus.txt"
    vocab = results(["vocab", "--input", corpus, "--output", tmp_path / "v.json", "--size", 150], capsys)
    assert (vocab["output"], vocab["pieces"], vocab["cased"]) == (str(tmp_path / "v.json"), 150, False)
    prepare = ["prepare", "--input", corpus, "--vocab", tmp_path / "v.json", "--output", tmp_path / "d", "--workers", 1]
    assert results([*prepare, "--seq_len", 64], capsys)["train"]["documents"] > 300
    evaluated = results(["evaluate", "--checkpoint", run, "--data", data], capsys)
    for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "unigram_loss"):
        assert evaluated[name] == pytest.approx(helpers.eval_rows(run)[-1][name], rel=1e-5)
    first, second = results(["fill-mask", "--checkpoint", run, TEXT, TEXT, "--top", 2], capsys)["texts"]
    assert first == second
    ((filling, *_),) = first["masks"]
    assert set(filling) == {"token", "probability", "text"}
    (tmp_path / "lines.txt").write_text("the ship .\n")
    features = ["features", "--checkpoint", run, "--input", tmp_path / "lines.txt", "--output", tmp_path / "f.jsonl"]
    features.append("--layers=-1")
    assert results(features, capsys)["lines"] == 1
    score = ["score", "--checkpoint", run, "--input", tmp_path / "lines.txt", "--output", tmp_path / "s.jsonl"]
    assert results([*score, "--masking", "within_word_l2r"], capsys)["tokens"] == 3
    exported = results(["export", "--checkpoint", run, "--output", tmp_path / "hf"], capsys)
    assert exported["architecture"] == "BertForPreTraining"
    imported = results(["import", "--source", tmp_path / "hf", "--output", tmp_path / "imported"], capsys)
    assert imported["cased"] is False
    assert "mlm_head" in imported["heads"]
    assert results(["report", run, "--output", tmp_path / "c.html"], capsys)["workdirs"] == [str(run)]


TEXT = "the ship sees the storm near the [MASK] ."


def test_fill_mask_prints_what_the_function_finds(journey: Path, capsys: pytest.CaptureFixture):
    assert cli.main(["fill-mask", "--checkpoint", str(journey / "run"), TEXT, "--top", "3"]) == 0
    lines = capsys.readouterr().out.strip().split("\n")
    words = [line.split()[1] for line in lines]
    assert lines[0].endswith(TEXT.replace("[MASK]", words[0]))
    (fillings,) = bert_jax.load(str(journey / "run")).fill_mask(TEXT, top=3)
    assert words == [filling.token for filling in fillings]
    assert len(words) == 3


def test_export_and_report(journey: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    arguments = ["export", "--checkpoint", str(journey / "run"), "--output", str(tmp_path / "hf")]
    assert cli.main(arguments) == 0
    assert {path.name for path in (tmp_path / "hf").iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads(capsys.readouterr().out)["architecture"] == "BertForPreTraining"
    assert cli.main(arguments) == 2
    assert str(tmp_path / "hf") in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("mine")
    assert cli.main([*arguments[:-1], str(tmp_path / "mine")]) == 2
    assert (tmp_path / "mine" / "config.json").read_text() == "mine"
    assert cli.main(["report", str(journey / "run"), "--output", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def fails_with_one_line(arguments: list[object], capsys: pytest.CaptureFixture, *words: str) -> None:
    """Status 2 and one line on stderr that says all of `words`."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    message = [line for line in error.split("\n") if line.startswith("bert-jax ")]
    assert len(message) == 1, error
    assert "Traceback" not in error
    for word in words:
        assert word in message[0]


def test_bad_options_are_refused_before_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture):
    arguments = ["prepare", "--input", tmp_path / "none", "--vocab", tmp_path / "none", "--output", tmp_path / "data"]
    fails_with_one_line([*arguments, "--seq_len=7"], capsys, "--seq_len=7", "8")
    fails_with_one_line([*arguments, "--language=english"], capsys, "--language='english'")
    fails_with_one_line([*arguments, "--max_line_repeats=-1"], capsys, "--max_line_repeats=-1")
    arguments = ["vocab", "--input", tmp_path / "none", "--output", tmp_path / "tokenizer.json"]
    fails_with_one_line([*arguments, f"--size={10**12}"], capsys, f"--size={10**12}", str(1 << 22))


def test_bad_keys(dataset_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    pretrain = ["pretrain", "--config=bert_tiny", f"--workdir={tmp_path}", f"--config.data.path={dataset_dir}"]
    fails_with_one_line([*pretrain, "--config.optimizer.warmup=3"], capsys, "optimizer.warmup_steps")
    fails_with_one_line([*pretrain, "--config.total_steps=many"], capsys, "total_steps=many", "int")
    fails_with_one_line(["pretrain", "--config=bert_tony", f"--workdir={tmp_path}"], capsys, "bert_tiny")


@pytest.mark.parametrize(
    "words",
    [
        "inspect ''", "report '' --output=a.html", "report a --output=", "fill-mask --checkpoint= '[MASK]'",
        "prepare --input '' --vocab=t.json --output=d", "prepare --input a --vocab= --output=d",
        "vocab --input a '' --output=t.json", "features --checkpoint=a --input= --output=b",
        "pretrain --config=bert_tiny --workdir=", "check --workdir=", "import --source= --output=a",
    ],
)  # fmt: skip
def test_empty_paths_are_refused(words: str, capsys: pytest.CaptureFixture):
    fails_with_one_line(shlex.split(words), capsys, "=: must be the name of a file or folder")


def test_python_has_the_checks_of_the_command_line(tmp_path: Path):
    with pytest.raises(InputError, match=r"^data=: must be the name of a file or folder"):
        bert_jax.inspect("")
    with pytest.raises(InputError, match=r"^format=onnx: expected one of hf, stablehlo"):
        bert_jax.export("a", "b", format="onnx")
    with pytest.raises(InputError, match=r"^output=.*tokenizer: .*\.json"):
        bert_jax.vocab(str(tmp_path / "tokenizer"), input="text.txt")
    with pytest.raises(InputError, match=r"^input=.*none.txt: "):
        bert_jax.vocab(tmp_path / "t.json", input=tmp_path / "none.txt")
    with pytest.raises(InputError, match=r"^workdir: expected at least one"):
        bert_jax.report([], tmp_path / "a.html")
    for function in (bert_jax.compile, bert_jax.plan_run, bert_jax.Training):
        with pytest.raises(InputError, match=r"^config=bert_tiny: expected a value of type PretrainConfig"):
            function("bert_tiny")


def test_errors_name_options_and_keys_as_they_are_typed():
    pretrain = cli.parse(["pretrain", "--config=bert_tiny", "--config.sed=1"])
    for message, expected in {
        "sed: unknown key (did you mean seed?)": "--config.sed: unknown key (did you mean seed?)",
        "optimizer.b1=2.0: must be less": "--config.optimizer.b1=2.0: must be less",
        "mfu=3: at most 1; a/seed=3, --mfu=0.5": "--mfu=3: at most 1; a/seed=3, --mfu=0.5",
        "the model: nothing": "the model: nothing",
        "checkpoint.milestones.1=-4: at least 0": "--config.checkpoint.milestones=-4: at least 0",
    }.items():
        assert module.in_options(message, pretrain) == expected
    vocab = cli.parse(["vocab", "--output=a", "--from=b"])
    for message in ("from=b: x", "from_=b: x"):
        assert module.in_options(message, vocab) == "--from=b: x"
    assert module.in_options("input.0=b: x", vocab) == "--input=b: x"


def test_closed_streams_end_no_run(tmp_path: Path):
    (tmp_path / "a.txt").write_text(helpers.make_corpus(documents=40))
    command = shlex.join(map(str, helpers.command("vocab", "--input", tmp_path / "a.txt", "--size=100")))
    done = child_processes.run(["bash", "-c", f"{command} --output {tmp_path / 't.json'} 2>&- <&- >&-"], timeout=120)
    assert done.returncode == 0
    assert read_tokenizer(tmp_path / "t.json").vocab_size == 100
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = child_processes.run(["bash", "-c", f"{command} --output {tmp_path}/é.json"], env=plain, timeout=120)
    assert (done.returncode, "/\\xe9.json" in done.stdout) == (0, True), done.stderr


def test_a_deleted_working_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    fails_with_one_line(["evaluate", "--checkpoint=a", "--data=b"], capsys, "the working folder was deleted")


def test_bad_checkpoints(dataset_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    fails_with_one_line(
        ["evaluate", "--checkpoint", tmp_path / "none", "--data", dataset_dir], capsys, str(tmp_path / "none")
    )
    fails_with_one_line(["fill-mask", "--checkpoint", tmp_path, "the [MASK] ."], capsys, str(tmp_path))


def test_evaluate_wants_a_batch(journey: Path, capsys: pytest.CaptureFixture):
    arguments = ["evaluate", "--checkpoint", journey / "run", "--data", journey / "data", "--batch_size", 0]
    fails_with_one_line(arguments, capsys, "--batch_size", "65536", "0")
    fails_with_one_line([*arguments[:-1], 10**12], capsys, "--batch_size", "65536")


def test_fill_mask_wants_a_mask(journey: Path, capsys: pytest.CaptureFixture):
    fails_with_one_line(["fill-mask", "--checkpoint", journey / "run", "the sea ."], capsys, "[MASK]", "the sea .")
    fails_with_one_line(["fill-mask", "--checkpoint", journey / "run", "caf\udce9 [MASK]"], capsys, "UTF-8", "caf")
    long = "the ship " * 100 + "[MASK]"
    fails_with_one_line(["fill-mask", "--checkpoint", journey / "run", long], capsys, "203")


@pytest.mark.parametrize(
    "arguments",
    [["prepare", "--frobnicate"], ["nothing"], [], ["evaluate", "--config.x=1"], ["--config.x=1"],
     ["--quiet", "inspect", "a"]],
)  # fmt: skip
def test_wrong_flags_exit_with_2(arguments: list[str]):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["prepare", "--inptu", "x"], ("--inptu", "--input")),
        (["prepare", "--seq_lne=5", "--input", "x"], ("--seq_lne=5", "--seq_len")),
        (["pretrain", "--worxdir", "x"], ("--worxdir", "--workdir")),
        (["evaluate", "--config.seed=1"], ("--config.seed=1", "evaluate")),
        (["pretrain", "--config=bert_tiny", "--config.seed"], ("--config.seed", "--config.seed=")),
        (["inspect", "a", "b"], ("b", "inspect --help")),
    ],
)
def test_a_misspelt_option_is_named_with_the_nearest_one(words, expected, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bert-jax {words[0]}: {expected[0]}:")
    assert expected[1] in line


def test_misspelt_commands_are_named_with_the_nearest_one(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["pretian"])
    assert stopped.value.code == 2
    assert "pretrain" in capsys.readouterr().err


def test_options_have_the_defaults_of_their_dataclass(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def prepare(input, vocab, output, options, **more):
        calls.append((input, options, more["seed"], more["workers"]))

    prepare.__doc__, prepare.__signature__ = bert_jax.prepare.__doc__, inspect.signature(bert_jax.prepare)
    monkeypatch.setitem(COMMANDS, "prepare", prepare)
    required = ["prepare", "--input", "a", "--vocab", "b", "--output", "c"]
    module.call(cli.parse(required))
    more = ["--drop_duplicates", "--seq_len=64", "--pairs", "none", "--short_seq_prob", "0", "--workers=2"]
    module.call(cli.parse([*required, *more]))
    options = bert_jax.PrepareOptions(drop_duplicates=True, seq_len=64, pairs="none", short_seq_prob=0.0)
    assert calls == [(["a"], bert_jax.PrepareOptions(), 0, None), (["a"], options, 0, "2")]
    assert "max_document_bytes" not in cli.parse(required)


def test_words_that_are_not_options_of_the_command():
    chosen = cli.parse(["prepare", "--input", "a", "--vocab", "b", "--output", "c", "--", "--temp_location=d", "-e"])
    assert chosen.beam_options == ["--temp_location=d", "-e"]
    overrides = cli.parse(["pretrain", "--config.seed=-1", "--config=a", "--workdir=b", "--config.data.path=c=d"])
    assert overrides.overrides == [("seed", "-1"), ("data.path", "c=d")]
    for layers in (["--layers=-1,-2"], ["--layers", "-1,-2"], ["--layers", "-1"]):
        words = ["features", "--checkpoint=a", "--input=b", "--output=c", *layers]
        assert cli.parse(words).layers == layers[-1].removeprefix("--layers=")
    assert cli.parse(["export", "--checkpoint=a", "--output=b", "--format=hf"]).output == "b"
    assert cli.parse(["fill-mask", "--checkpoint=a", "--top", "2", "-- [MASK]"]).text == ["-- [MASK]"]


def test_commands_that_do_not_train_do_not_wait_for_jax():
    modules = "bert_jax.cli, bert_jax.data.preparation.pipeline, bert_jax.text.vocabulary_training"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    helpers.run_python(code)


@pytest.mark.parametrize("words", [["--help"], ["pretrain", "--help"], ["completion", "bash"], ["configs"]])
def test_help_and_completion_import_neither_jax_nor_numpy(words: list[str]):
    refused = {"jax", "numpy", "ml_collections"} | ({"fsspec", "asyncio"} if "--help" in words else set())
    code = (
        f"import sys; from bert_jax import cli\ntry: cli.main({words!r})\nexcept SystemExit: pass\n"
        f"sys.exit(bool({refused} & {{*sys.modules}}))"
    )
    helpers.run_python(code)


# --- The command that `prepare` names next -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [([], "a dataset"), (["--pairs", "none"], "-y"), (["--seq_len", "600"], "data"), ([], "a,b")],
    ids=["pairs", "singles", "long", "comma"],
)
def test_pretrain_accepts_the_dataset(
    options: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(helpers.make_corpus(documents=60))
    helpers.write_tokenizer(tmp_path / "t.json", helpers.make_vocabulary())
    words = ["prepare", "--input=a.txt", "--vocab=t.json", f"--output={name}", "--sentences=lines", "--workers=1"]
    assert cli.main([*words, *options]) == 0
    found = re.findall("Next: bert-jax (.*)", capsys.readouterr().out)
    assert len(found) == ("," not in name)
    for command in found:
        assert cli.main([*shlex.split(command), "--dry_run"]) == 0
