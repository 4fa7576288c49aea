"""The demo's model, made in code: a Llama of some 90,000 parameters and its tokenizer.

`make_model` leaves a directory that vLLM, transformers and a publication all read. Nothing is
downloaded. Called by `run.py`; torch and transformers are imported only then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from producer.demo import laps

#: Prompt, longest response, and room for a resume to be checked against.
MAX_MODEL_LEN = 192


def make_model(directory: Path, seed: int, length: int = MAX_MODEL_LEN) -> Any:
    """Save a freshly initialised model and its tokenizer; return the model (on the CPU).

    The same seed gives the same weights. Weights are float32: a CPU without AVX-512 is
    several times slower in bfloat16.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    special = {"pad_token_id": laps.PAD, "bos_token_id": laps.BOS, "eos_token_id": laps.EOS}
    config = LlamaConfig(
        vocab_size=len(laps.VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=length,
        tie_word_embeddings=False,
        # Wider than usual: with so few units the customary 0.02 starts too flat to learn.
        initializer_range=0.1,
        dtype="float32",
        **special,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    model.generation_config = GenerationConfig(**special)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model


def load_model(directory: Path) -> Any:
    """A causal language model of transformers, float32, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )


def misfit(directory: Path) -> str | None:
    """Why a model directory cannot do the task, or None: its vocabulary must be the task's."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        return f"it cannot be read as a model of transformers: {error}"
    vocabulary = tokenizer.get_vocab()
    wrong = [w for i, w in enumerate(laps.VOCABULARY) if vocabulary.get(w) != i]
    if wrong:
        return (
            f"its tokenizer lacks the task's words, or has them under other ids: "
            f"{' '.join(wrong[:8])}{' ...' if len(wrong) > 8 else ''}. The demo needs the "
            f"vocabulary of producer/demo/laps.py, ids 0 to {len(laps.VOCABULARY) - 1}"
        )
    if config.eos_token_id not in (laps.EOS, [laps.EOS]):
        return f"its eos_token_id is {config.eos_token_id}; the task ends with {laps.EOS}"
    return None


def make_tokenizer() -> Any:
    """Words separated by blanks, one id a word, as in `laps.VOCABULARY`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, bos, eos = laps.VOCABULARY[:3]
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(laps.VOCABULARY)}, unk_token=pad)
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece(prefix="", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=pad
    )
