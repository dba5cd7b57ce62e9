"""Scripts that need what the reference strips as accents: `--keep_accents`."""

from bert_jax import cli
from bert_jax.data.dataset import PreparedDataset
from bert_jax.data.report import inspect_dataset
from bert_jax.text.tokenizer import read_tokenizer

KOREAN = [
    "나는 오늘 학교에 간다.", "우리는 어제 바다에서 물고기를 보았다.", "어머니는 시장에서 사과를 사셨다.",
    "아이들이 운동장에서 공을 찬다.", "비가 오면 우산을 쓰고 걷는다.", "그는 밤마다 책을 읽고 편지를 쓴다.",
    "겨울에는 산에 눈이 많이 내린다.", "친구와 함께 기차를 타고 부산에 갔다.",
]  # fmt: skip


def vocab(folder, documents, *options: object, size: int = 400) -> int:
    (folder / "text.txt").write_text("\n\n".join(documents * 4) + "\n")
    arguments = [
        "vocab",
        "--input",
        folder / "text.txt",
        "--output",
        folder / "tokenizer.json",
        "--size",
        size,
        *options,
    ]
    return cli.main([str(argument) for argument in arguments])


def prepare(folder, *options: object) -> PreparedDataset:
    arguments = [
        "prepare", "--input", folder / "text.txt", "--vocab", folder / "tokenizer.json", "--output", folder / "data",
        "--pairs", "none", "--workers", 1, "--seq_len", 32, *options,
    ]  # fmt: skip
    assert cli.main([str(argument) for argument in arguments]) == 0
    return PreparedDataset(str(folder / "data"))


def test_uncased_korean_keeps_its_syllables(tmp_path):
    assert vocab(tmp_path, [text.replace("책", "BOOK") for text in KOREAN], "--keep_accents") == 0
    dataset = prepare(tmp_path, "--language", "ko")
    pieces = dataset.tokenizer.vocab
    assert dataset.tokenizer.decode(dataset.tokenizer.encode_batch(["우산을 BOOK"])[0]) == "우산을 book"
    assert not any("\u1100" <= character <= "\u11ff" for piece in pieces for character in piece)
    assert inspect_dataset(str(tmp_path / "data"))["unk_rate"] == 0
    assert not read_tokenizer(tmp_path / "tokenizer.json").strip_accents
