"""A Llama whose next token depends on the last one alone, by a table: what it says is known.

Attention and MLP add nothing, an embedding is a unit vector, and the head is the table. It has
a byte-level tokenizer, so a character may be cut by the end of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

EOS = 2
_SPECIAL = ("<pad>", "<s>", "</s>")


def make_bigram(directory: Path, tokens: Sequence[bytes], logits: NDArray[np.float64]) -> Any:
    """Save the model of `logits[last, next]` and return it; ids are those of `ids_of`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = len(_SPECIAL) + len(tokens)
    hidden = -(-size // 64) * 64
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=hidden // 32,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-9,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size, hidden))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        # The norm before the head makes a unit vector sqrt(hidden) long.
        model.lm_head.weight[:, :size] = torch.tensor(logits.T) / hidden**0.5
    model.save_pretrained(directory)
    _make_tokenizer(tokens).save_pretrained(directory)
    return model


def ids_of(tokens: Sequence[bytes], *wanted: bytes) -> list[int]:
    return [len(_SPECIAL) + tokens.index(token) for token in wanted]


def _make_tokenizer(tokens: Sequence[bytes]) -> Any:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = _byte_letters()
    vocab = {token: i for i, token in enumerate(_SPECIAL)}
    vocab |= {"".join(letters[b] for b in token): i for i, token in enumerate(tokens, len(vocab))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level vocabularies (GPT-2)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + i) for i in range(256 - len(kept)))
    return [chr(b) if b in kept else next(others) for b in range(256)]
