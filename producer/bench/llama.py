"""Models for `rollq bench engine`: a Llama's configuration and tokenizer, and no weights.

vLLM makes random weights itself (`--load-format dummy`), so nothing is downloaded, and neither
torch nor transformers is loaded here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: what differs between them, by the names of transformers' `LlamaConfig`
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    # As SmolLM2-135M: 134.5 million parameters.
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}


def make_llama(directory: Path, shape: str, max_model_len: int) -> None:
    """Write the files that vLLM starts such a model from."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **SHAPES[shape],
    }
    (directory / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2"})
    )
