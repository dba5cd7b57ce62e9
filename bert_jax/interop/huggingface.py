"""Export to the layout that Hugging Face's `transformers` loads as `BertForPreTraining` and `AutoTokenizer`."""

import json
from typing import Any

import numpy as np
from etils import epath
from safetensors.numpy import save_file

from bert_jax.data.tokenization import WordPieceTokenizer
from bert_jax.errors import InputError
from bert_jax.model import BertConfig
from bert_jax.model.bert import Parameters
from bert_jax.training.checkpoints import Checkpoint


def state_dict(parameters: Parameters, config: BertConfig) -> dict[str, np.ndarray]:
    """The parameters by the names and in the shapes of `transformers`' BertForPreTraining, fp32.

    Dense weights are [out, in] there; query, key and value are matrices of their own; layers are numbered; the
    vocabulary's padding is left out. Tied weights are listed once, as `transformers` saves them.
    """
    size, vocab = config.hidden_size, config.vocab_size
    result: dict[str, np.ndarray] = {}

    def put(name: str, value: Any) -> None:
        result[name] = np.ascontiguousarray(value, np.float32)

    def put_dense(name: str, kernel: Any, bias: Any) -> None:
        put(f"{name}.weight", np.asarray(kernel).T)
        put(f"{name}.bias", bias)

    def put_norm(name: str, norm: Parameters) -> None:
        put(f"{name}.weight", norm["scale"])
        put(f"{name}.bias", norm["bias"])

    embeddings = parameters["embeddings"]
    put("bert.embeddings.word_embeddings.weight", np.asarray(embeddings["word"])[:vocab])
    put("bert.embeddings.position_embeddings.weight", embeddings["position"])
    put("bert.embeddings.token_type_embeddings.weight", embeddings["token_type"])
    put_norm("bert.embeddings.LayerNorm", embeddings["norm"])

    stacked = parameters["encoder"]["layers"]
    for number in range(config.num_hidden_layers):
        layer = {
            part: {name: np.asarray(value)[number] for name, value in values.items()}
            for part, values in stacked.items()
        }
        attention, feed_forward = layer["attention"], layer["feed_forward"]
        name = f"bert.encoder.layer.{number}"
        for i, projection in enumerate(("query", "key", "value")):
            kernel, bias = attention["qkv_kernel"][:, i], attention["qkv_bias"][i]
            put_dense(f"{name}.attention.self.{projection}", kernel.reshape(size, size), bias.reshape(size))
        put_dense(
            f"{name}.attention.output.dense",
            attention["output_kernel"].reshape(size, size),
            attention["output_bias"],
        )
        put_norm(f"{name}.attention.output.LayerNorm", layer["attention_norm"])
        put_dense(f"{name}.intermediate.dense", feed_forward["up_kernel"], feed_forward["up_bias"])
        put_dense(f"{name}.output.dense", feed_forward["down_kernel"], feed_forward["down_bias"])
        put_norm(f"{name}.output.LayerNorm", layer["feed_forward_norm"])

    put_dense("bert.pooler.dense", parameters["pooler"]["kernel"], parameters["pooler"]["bias"])
    mlm = parameters["mlm_head"]
    put_dense("cls.predictions.transform.dense", mlm["kernel"], mlm["bias"])
    put_norm("cls.predictions.transform.LayerNorm", mlm["norm"])
    put("cls.predictions.bias", np.asarray(mlm["output_bias"])[:vocab])
    put_dense("cls.seq_relationship", parameters["nsp_head"]["kernel"], parameters["nsp_head"]["bias"])
    return result


def model_config(config: BertConfig, tokenizer: WordPieceTokenizer) -> dict[str, Any]:
    """The contents of `config.json`."""
    return {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        **config.to_dict(),
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
    }


def export(checkpoint: Checkpoint, output: str) -> None:
    """Writes `config.json`, `model.safetensors`, `vocab.txt` and the tokenizer's files to the folder `output`.

    Raises InputError where `output` is a file or a folder with something in it. The weights come last: a folder with
    them is whole.
    """
    folder = epath.Path(output)
    if not output or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise InputError(f"--output: {output!r} is taken: choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.tokenizer.save_huggingface(str(folder), model_max_length=checkpoint.bert_config.max_position_embeddings)
    (folder / "config.json").write_text(
        json.dumps(model_config(checkpoint.bert_config, checkpoint.tokenizer), indent=2, sort_keys=True) + "\n"
    )
    weights = state_dict(checkpoint.load_parameters(), checkpoint.bert_config)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
