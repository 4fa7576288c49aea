"""A tiny random Llama, made in code, for the tests that run a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 60
EOS = 2


def make_llama(
    directory: Path, *, seed: int = 0, tied: bool = False, tokenizer: bool = True
) -> Any:
    """Save a model of 2 layers to `directory` and return it; ids 3 to 59 are letters.

    The weights are large enough for logits that differ, so that greedy output varies.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.6,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    if tokenizer:
        _make_tokenizer().save_pretrained(directory)
    return model


def _make_tokenizer() -> Any:
    """One character a token: a letter, or `<unk>`; chat messages are joined with `:`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .:!?"[: VOCAB - 4]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": EOS, "<unk>": 3}
    vocab |= {letter: i for i, letter in enumerate(letters, start=4)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        chat_template=(
            "{% for m in messages %}{{ m.role }}:{{ m.content }}!{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        ),
    )
