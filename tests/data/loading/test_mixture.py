"""Mixtures of datasets: shares, epochs of each dataset, and refused combinations."""

import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from support import helpers, runs

from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.loading.loader import EvalLoader, Mixture, TrainLoader, TrainRows, row_shares
from bert_jax.data.loading.masking import Masking
from bert_jax.errors import InputError
from bert_jax.sections import to_dict
from bert_jax.text.tokenizer import read_tokenizer
from bert_jax.training import run
from bert_jax.training.checkpoints import open_checkpoint
from bert_jax.training.evaluation import evaluate_checkpoint
from bert_jax.training.pretrain import pretrain


@pytest.mark.parametrize("weights", [(1,), (1, 1), (0.7, 0.2, 0.1), (1e-3, 1), (3, 3, 3)])
def test_shares(weights):
    mixture = Mixture(weights, key=5)
    count = 50_000
    sources, numbers = mixture.locate(np.arange(count))
    for source, weight in enumerate(weights):
        of_source = numbers[sources == source]
        assert of_source.tolist() == list(range(len(of_source)))  # none skipped, none twice
        assert len(of_source) == pytest.approx(count * weight / sum(weights), abs=150)
    for rows in (0, 1, 4095, 4096, 4097, 12_345, count):
        assert mixture.counts(rows) == np.bincount(sources[:rows], minlength=len(weights)).tolist()
    some = np.array([40_000, 5, 8191, 8192, 17])
    np.testing.assert_array_equal(mixture.locate(some), (sources[some], numbers[some]))


@pytest.mark.parametrize("sizes", [(6_000_000, 1_000, 3_000_000), (8_000_000, 3_000, 10, 5_000_000), (10, 5_000, 9)])
def test_rare_sources_between_others(sizes):
    mixture = Mixture(row_shares(sizes), key=7)
    counts = np.array([mixture.counts(period * 4096) for period in range(600)])
    assert (np.diff(counts, axis=0) >= 0).all()
    assert (counts.sum(axis=1) == 4096 * np.arange(600)).all()
    np.testing.assert_allclose(counts[-1], counts[-1].sum() * np.array(sizes) / sum(sizes), atol=len(sizes))
    sources, numbers = mixture.locate(np.arange(40 * 4096))
    for source in range(len(sizes)):
        assert numbers[sources == source].tolist() == list(range(counts[40, source]))


def test_the_rows_of_earlier_runs_stay_where_they_were():
    sources, numbers = Mixture((0.5, 0.3, 0.2), key=5).locate(np.arange(4090, 4102))
    assert sources.tolist() == [0, 1, 1, 2, 0, 2, 0, 0, 2, 2, 0, 2]
    assert numbers.tolist() == [2046, 1226, 1227, 818, 2047, 819, 2048, 2049, 820, 821, 2050, 822]


def rows_of(folder, seed=0):
    return TrainRows(PreparedDataset(str(folder)), seed=seed, masking=Masking(10))


def test_each_source_in_its_own_epochs(dataset_dir, other_dir):
    sources = [rows_of(dataset_dir), rows_of(other_dir)]
    loader = TrainLoader(sources, seed=0, global_batch_size=64, weights=(0.5, 0.5))
    steps = 2 * sources[1].size // 32
    batches = [loader.batch(step) for step in range(steps)]
    seen = np.concatenate([batch["next_sentence_labels"] for batch in batches])
    assert seen.shape == (64 * steps, 1)
    first, second = loader.epochs(steps)
    assert second == pytest.approx(2, abs=0.2)
    assert first == pytest.approx(second * sources[1].size / sources[0].size, rel=0.1)
    # The rows are the sources' own, each in its order.
    mixed = np.concatenate([batch["input_ids"] for batch in batches])
    for source in sources:
        own = list(map(tuple, source.rows(np.arange(32 * steps - 40))["input_ids"].tolist()))
        known = set(own)
        assert [row for row in map(tuple, mixed.tolist()) if row in known][: len(own)] == own


def test_evaluation_is_over_all(dataset_dir, other_dir):
    datasets = [PreparedDataset(str(folder)) for folder in (dataset_dir, other_dir)]
    mixed = EvalLoader(datasets, batch_size=8)
    alone = [EvalLoader([dataset], batch_size=8) for dataset in datasets]

    def rows(loaders):
        return sorted(
            tuple(row)
            for loader in loaders
            for batch in loader
            for row in batch["input_ids"][batch["next_sentence_weights"][:, 0] > 0].tolist()
        )

    assert rows([mixed]) == rows(alone)
    sources = [mixed.source(number) for number in range(mixed.batches)]
    assert [sources.count(index) for index in (0, 1)] == [loader.batches for loader in alone]
    first, last = sources.index(1), max(number for number, source in enumerate(sources) if source == 1)
    assert last - first > 0.5 * mixed.batches  # spread, not one after the other
    few = EvalLoader([*datasets, *datasets[:1]] * 2, batch_size=8, batches=6)
    assert [few.source(number) for number in range(few.batches)] == [0, 1, 2, 3, 4, 5]  # a small one is not left out
    for number, source in enumerate(sources[: mixed.batches]):
        known = {tuple(row) for batch in alone[source] for row in batch["input_ids"].tolist()}
        assert {tuple(row) for row in mixed.batch(number)["input_ids"].tolist()} <= known


@pytest.mark.parametrize("batches", [1, 2, 3, -1])
def test_microbatches_of_evaluations_have_the_same_rows(dataset_dir, other_dir, batches):
    datasets = [PreparedDataset(str(folder)) for folder in (dataset_dir, other_dir)]

    def rows(microbatches):
        size = 16 // microbatches
        loader = EvalLoader(datasets, batch_size=size, microbatches=microbatches, batches=batches)
        return [row for batch in loader for row in batch["input_ids"][batch["masked_weights"].any(1)].tolist()]

    assert rows(2) == rows(1)
    assert rows(4) == rows(1)
    assert rows(16) == rows(1)


def rows_of_packs(folder):
    return TrainRows(PreparedDataset(str(folder)), seed=0, masking=Masking(10), max_sequences=4).size


# --- Runs -------------------------------------------------------------------------------------------------------


def config(folders, **overrides):
    return helpers.small_config(",".join(map(str, folders)), **overrides)


def test_each_dataset_of_a_mixture_has_its_own_loss(dataset_dir, other_dir, tmp_path):
    folders = [dataset_dir, other_dir]
    pretrain(config(folders, total_steps=4, eval_every_steps=4, eval_batches=-1), str(tmp_path / "run"))
    (row,) = helpers.eval_rows(tmp_path / "run")
    opened = open_checkpoint(str(tmp_path / "run"))
    for index, folder in enumerate(folders):
        alone = evaluate_checkpoint(opened, str(folder))
        for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"):
            assert row[f"{name}_{index}"] == pytest.approx(alone[name], rel=1e-5)
    assert min(row["mlm_loss_0"], row["mlm_loss_1"]) < row["mlm_loss"] < max(row["mlm_loss_0"], row["mlm_loss_1"])
    assert row["sequences"] == sum(PreparedDataset(str(folder)).size("eval") for folder in folders)


def test_sequences_of_an_evaluation_are_those_that_were_measured(dataset_dir, other_dir, tmp_path):
    folders = [dataset_dir, other_dir]
    sizes = [PreparedDataset(str(folder)).size("eval") for folder in folders]
    size = -(-(min(sizes) + 1) // 8) * 8  # the first batch of the smaller one is not full
    count = sum(-(-split // size) for split in sizes) - 1
    pretrain(config(folders, total_steps=3, eval_batches=count, global_batch_size=size), str(tmp_path / "run"))
    (row,) = helpers.eval_rows(tmp_path / "run")
    loader = EvalLoader([PreparedDataset(str(folder)) for folder in folders], batch_size=size)
    assert row["sequences"] == sum((loader.batch(number)["masked_weights"].any(1)).sum() for number in range(count))
    assert row["sequences"] < count * size


@pytest.mark.long
def test_a_mixed_and_packed_run_resumes_to_the_bit(dataset_dir, other_dir, tmp_path):
    overrides = {"data__weights": (0.6, 0.4), "data__packing": True, "data__max_sequences": 4}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    paths = f"{dataset_dir}, {other_dir}"
    runs.train(paths, whole, **overrides)
    runs.train_until(100, paths, stopped, signal.SIGKILL, saved=1, **overrides)
    done = runs.train(paths, stopped, **overrides)
    assert done.returncode == 0, done.stderr
    assert "Resuming from step" in done.stderr
    runs.assert_same_run(whole, stopped)
    rows = helpers.train_rows(whole)
    first, second = rows[-1]["epoch_0"], rows[-1]["epoch_1"]
    read = np.array([first * rows_of_packs(dataset_dir), second * rows_of_packs(other_dir)])
    assert read.sum() == pytest.approx(rows[-1]["step"] * runs.SETTINGS["global_batch_size"])
    assert read[1] / read.sum() == pytest.approx(0.4, abs=0.04)  # exact in 4,096 rows
    assert "epoch" not in rows[-1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__weights": (1, 2, 3)}, r"data\.weights=\(1\.0, 2\.0, 3\.0\): .*\b2 "),
        ({"data__weights": "size**2"}, r"data\.weights=size\*\*2: must be .*size\*\*0\.7"),
        ({"data__weights": "sizes"}, r"data\.weights=sizes: "),
        ({"data__weights": (1, 0)}, r"data\.weights=\(1\.0, 0\.0\): "),
        ({"data__weights": (1, 1e-12)}, r"data\.weights=\(1\.0, 1e-12\): "),
        ({"data__weights": (1, "x")}, r"data\.weights\.1=x: "),
        ({"data__max_sequences": 0}, r"data\.max_sequences=0: "),
    ],
)
def test_invalid_mixtures_are_refused(overrides, message, dataset_dir, other_dir, tmp_path):
    with pytest.raises(InputError, match=message):
        pretrain(config([dataset_dir, other_dir], **overrides), str(tmp_path / "run"))


def test_incompatible_datasets_are_refused(dataset_dir, vocabulary_file, corpus_file, tmp_path):
    helpers.prepare_dataset(corpus_file, vocabulary_file, tmp_path / "short", seq_len=32)
    with pytest.raises(InputError, match=f"{tmp_path / 'short'}.*--seq_len"):
        pretrain(config([dataset_dir, tmp_path / "short"]), str(tmp_path / "run"))
    pieces = read_tokenizer(vocabulary_file).vocab
    helpers.write_tokenizer(tmp_path / "tokenizer.json", [*pieces, "zzz"])
    helpers.prepare_dataset(corpus_file, tmp_path / "tokenizer.json", tmp_path / "words")
    with pytest.raises(InputError, match=str(tmp_path / "words")):
        pretrain(config([dataset_dir, tmp_path / "words"]), str(tmp_path / "run"))


def test_a_mixture_cannot_be_changed_in_a_workdir(dataset_dir, other_dir, tmp_path, monkeypatch):
    before = config([dataset_dir, other_dir])
    phases = helpers.open_phases(before)
    tokenizer = phases[0].datasets[0].tokenizer
    hashes = phases[-1].dataset_hashes
    checkpoint = SimpleNamespace(step=4, config=to_dict(before), tokenizer=tokenizer, dataset_hashes=hashes)
    monkeypatch.setattr(run, "newest_intact", lambda folder: checkpoint)
    assert run.claim_workdir(tmp_path, phases) is checkpoint
    with pytest.raises(InputError, match=r"data\.weights"):
        run.claim_workdir(tmp_path, helpers.open_phases(config([dataset_dir, other_dir], data__weights=(1, 2))))


@pytest.mark.parametrize("weights", [(), (0.8, 0.2)])
def test_sequences_a_row_and_share_of_real_tokens_are_those_of_the_batches(dataset_dir, other_dir, weights):
    sources = [
        TrainRows(PreparedDataset(str(folder)), seed=0, masking=Masking(10), max_sequences=most)
        for folder, most in ((dataset_dir, 4), (other_dir, 4))
    ]
    loader = TrainLoader(sources, seed=0, global_batch_size=2048, weights=weights)
    batch = loader.batch(0)
    assert loader.sequences_a_row > 1.2
    assert batch["sequence_ids"].max(axis=1).mean() == pytest.approx(loader.sequences_a_row, rel=0.05)
    assert (batch["sequence_ids"] > 0).mean() == pytest.approx(loader.real_share, rel=0.02)


def test_weights_may_be_a_power_of_the_sizes(dataset_dir, other_dir):
    shares = {}
    for power in ("0", "0.5", "1"):
        (phase,) = helpers.open_phases(config([dataset_dir, other_dir], data__weights=f"size**{power}"))
        rows = phase.train_loader.next_rows(1000)
        shares[power] = rows[0] / sum(rows)
    first, second = (PreparedDataset(str(folder)).size("train") for folder in (dataset_dir, other_dir))
    assert shares["0"] == pytest.approx(0.5, abs=0.01)
    assert shares["0.5"] == pytest.approx(first**0.5 / (first**0.5 + second**0.5), abs=0.01)
    assert shares["1"] == pytest.approx(first / (first + second), abs=0.01)


def test_one_dataset_under_two_paths_is_refused(dataset_dir, tmp_path):
    shutil.copytree(dataset_dir, tmp_path / "copy")
    with pytest.raises(InputError, match=f"{dataset_dir} and {tmp_path / 'copy'} are the same dataset"):
        helpers.open_phases(config([dataset_dir, tmp_path / "copy"]))


def test_two_kinds_of_pairs_are_refused_where_their_labels_are_read(dataset_dir, other_dir, tmp_path):
    shutil.copytree(other_dir, tmp_path / "sop")
    info = tmp_path / "sop" / "dataset.json"
    info.write_text(info.read_text().replace('"pairs": "nsp"', '"pairs": "sop"'))
    folders = [dataset_dir, tmp_path / "sop"]
    with pytest.raises(InputError, match="some with --pairs sop, whose labels differ in meaning"):
        helpers.open_phases(config(folders))
    helpers.open_phases(config(folders, objective__nsp=False))
    phases = tuple({"steps": 4, "data.path": str(folder)} for folder in folders)
    with pytest.raises(InputError, match="some with --pairs sop, whose labels differ in meaning"):
        helpers.open_phases(helpers.small_config(dataset_dir, phases=phases))
    last = {**phases[1], "objective.nsp": False}
    helpers.open_phases(helpers.small_config(dataset_dir, phases=(phases[0], last)))
