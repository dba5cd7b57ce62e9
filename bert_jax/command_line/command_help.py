"""The end of each command's `--help`: inputs, outputs and examples."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CommandHelp:
    """Inputs and outputs of a command, and command lines without the program's name."""

    reads: str
    writes: str
    examples: tuple[str, ...]


COMMAND_HELP = {
    "check": CommandHelp(
        "nothing",
        "nothing that it keeps",
        ("check", "check --workdir=runs", "check --workdir=gs://bucket/runs --json"),
    ),
    "vocab": CommandHelp(
        "text, JSON lines, CSV, Parquet, Arrow, TFDS datasets, or stdin",
        "FILE, a tokenizer.json",
        (
            "vocab --input 'text/*.txt' --output tokenizer.json",
            "vocab --input 'wiki/*.jsonl.gz' --output tokenizer.json --cased --size 28996",
            "vocab --input reviews.csv --text_field body --output tokenizer.json --size 8192",
            "vocab --input 'thai/*.txt' --output thai.json --kind unigram --size 32000",
            "vocab --extend imported --input 'domain/*.txt' --add 1000 --output extended.json",
        ),
    ),
    "prepare": CommandHelp(
        "text, JSON lines, CSV, Parquet, Arrow, TFDS datasets, or stdin; and a tokenizer.json or a checkpoint",
        "DIR, a dataset for pretrain: dataset.json, tokenizer.json and shards",
        (
            "prepare --input 'text/*.txt' --vocab tokenizer.json --output data",
            "prepare --input 'wiki/*.jsonl.gz' --vocab tokenizer.json --output data512 --seq_len 512 --workers 8",
            "prepare --input reviews.csv --text_field body --vocab tokenizer.json --output reviews",
            "prepare --input hf://datasets/wikimedia/wikipedia/20231101.en --vocab tokenizer.json --output wiki",
            "prepare --input 'domain/*.txt' --vocab imported --output data",
        ),
    ),
    "inspect": CommandHelp("a prepared dataset", "nothing", ("inspect data", "inspect data --samples 10 --json")),
    "pretrain": CommandHelp(
        "a config and prepared datasets",
        "DIR: config.json, checkpoints/STEP, metrics.jsonl, and TensorBoard's events",
        (
            "pretrain --config=bert_base --workdir=runs/base --config.data.path=data",
            "pretrain --config=bert_tiny --workdir=runs/try --config.data.path=data --config.total_steps=40",
            "pretrain --config=bert_base --config.data.path=data --dry_run --device=v5e --devices=8",
            "pretrain --config=continue --workdir=runs/domain --config.init=imported --config.data.path=data",
        ),
    ),
    "evaluate": CommandHelp(
        "a checkpoint, and a prepared dataset or a labelled file",
        "nothing",
        (
            "evaluate --checkpoint=runs/base --data=data",
            "evaluate --checkpoint=runs/base --data=data --steps=all",
            "evaluate --checkpoint=runs/mine --data=dev.csv",
        ),
    ),
    "finetune": CommandHelp(
        "a config, a checkpoint and the files of a task",
        "DIR: config.json, checkpoints/STEP, metrics.jsonl, result.json, and predictions/",
        (
            "finetune --config=finetune/glue:sst2 --workdir=runs/sst2 --config.init=runs/base "
            "--config.data.path=glue/SST-2",
            "finetune --config=finetune/text --workdir=runs/mine --config.init=runs/base "
            "--config.task.train=train.csv --config.task.dev=dev.csv",
        ),
    ),
    "predict": CommandHelp(
        "a fine-tuned checkpoint and a file",
        "FILE, one JSON object a line",
        (
            "predict --checkpoint=runs/mine --input=new.csv --output=predictions.jsonl",
            "predict --checkpoint=runs/mine --input=new.csv --output=predictions.jsonl --text text --strict",
        ),
    ),
    "study": CommandHelp(
        "a config, prepared datasets and the files of tasks",
        "DIR: table.md, table.json, table.png, and the workdir of every run",
        (
            "study studies/table5 --workdir=runs/table5 --config.pretraining.data.path=data --config.task_data=tasks",
            "study studies/table1 --workdir=runs/table1 --config.checkpoints.base=runs/base --config.task_data=tasks",
        ),
    ),
    "fill-mask": CommandHelp(
        "a pre-trained checkpoint",
        "nothing",
        ("fill-mask --checkpoint=runs/base 'Paris is the [MASK] of France.'",),
    ),
    "features": CommandHelp(
        "a checkpoint and a text file",
        "FILE, one JSON object a line, or arrays in .npz",
        (
            "features --checkpoint=runs/base --input=lines.txt --output=features.jsonl",
            "features --checkpoint=runs/base --input=lines.txt --output=features.npz --layers=last_four",
        ),
    ),
    "export": CommandHelp(
        "a checkpoint",
        "DIR: config.json, model.safetensors, tokenizer.json; or a program of StableHLO",
        (
            "export --checkpoint=runs/base --output=hf",
            "export --checkpoint=runs/base --output=revisions --steps=all",
            "export --checkpoint=runs/mine --output=hlo --format=stablehlo",
        ),
    ),
    "import": CommandHelp(
        "a folder of Hugging Face transformers, or a TensorFlow checkpoint",
        "DIR, a checkpoint without optimizer state",
        ("import --source=hf --output=imported", "import --source=hf --output=smaller --layers=0,2,4"),
    ),
    "compile": CommandHelp(
        "a config, and the dataset's sizes if data.path is set",
        "nothing",
        (
            "compile --config=bert_large:v5e --topology=v5e:4x4",
            "compile --config=bert_base --topology=v5e:2x2 --profile --json",
        ),
    ),
    "report": CommandHelp(
        "the metrics of workdirs",
        "FILE, a page, tables or an image",
        ("report runs/base --output=report.html", "report runs/base runs/mine --output=report.html"),
    ),
    "configs": CommandHelp("the packaged configs, or FILE.py", "nothing", ("configs", "configs bert_tiny")),
    "completion": CommandHelp(
        "nothing", "nothing", ("completion bash > ~/.local/share/bash-completion/completions/bert-jax.bash",)
    ),
}
