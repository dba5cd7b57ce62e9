"""Directives that document the public Python names, with the docstrings of the sources."""

import inspect

import bert_jax

MODULES = {  # modules that the documentation promises, besides the package itself: heading and names, () for all
    "bert_jax.config": ("Configs", ("load_config", "to_config_dict")),
    "bert_jax.sections": ("Sections of configs", ("with_values", "from_mapping", "to_dict", "flatten")),
    "bert_jax.training.pretrain": ("Pre-training", ("pretrain",)),
    "bert_jax.finetuning.finetune": ("Fine-tuning", ("finetune",)),
    "bert_jax.finetuning.fine_tuned": ("Predictions of a fine-tuned model", ("predict", "evaluate_finetuned")),
    "bert_jax.inference.features": ("Features", ("extract",)),
    "bert_jax.data.dataset": ("Prepared datasets", ("PreparedDataset", "DatasetInfo", "SplitInfo", "Shard")),
    "bert_jax.data.records": ("Records", ("Instances", "decode", "make_headers")),
    "bert_jax.batch": ("Batches", ("Batch",)),
    "bert_jax.model.bert_config": ("Model config", ("BertConfig",)),
    "bert_jax.text.tokenizer": ("Tokenizers", ("Tokenizer",)),
    "bert_jax.text.wordpiece": ("WordPiece", ("wordpiece_tokenizer",)),
    "bert_jax.interop.huggingface": ("Export", ("export",)),
    "bert_jax.interop.importing": ("Import", ("import_checkpoint",)),
    "bert_jax.errors": ("Errors", ("BertJaxError", "InputError")),
}


def api() -> str:
    """Returns the directives: first the names of `bert_jax` itself, then those of `MODULES` that it does not have."""
    parts = ["## bert_jax", _directives("bert_jax", tuple(sorted(bert_jax.__all__, key=str.lower)))]
    for module, (heading, names) in MODULES.items():
        if others := tuple(name for name in names if name not in bert_jax.__all__):
            parts += [f"## {heading}", f"`{module}`", _directives(module, others)]
    return "\n\n".join(parts) + "\n"


def _directives(module: str, names: tuple[str, ...]) -> str:
    lines = ["```{eval-rst}"]
    namespace = __import__(module, fromlist=names)
    for name in names:
        value = getattr(namespace, name)
        kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
        options = ["   :members:", "   :undoc-members:"] if kind == "class" and not issubclass(value, Exception) else []
        lines += [f".. auto{kind}:: {module}.{name}", *options, ""]
    return "\n".join([*lines, "```"])
