"""Small random models in Hugging Face folders: real architectures, a real tokenizer, milliseconds to run."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def ascii_tokenizer() -> Tokenizer:
    """Control tokens, each printable ASCII character, and pairs of capitals: every token is whole text."""
    letters = string.ascii_uppercase
    pairs = [(a, b) for a in letters[:7] for b in letters]
    characters = [*string.printable[:94], "Ġ", "Ċ"]
    tokens = [*CONTROL, *characters, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL))
    return tokenizer


def save_tiny(
    folder: Path, model_type: str, *, seed: int = 0, max_shard_size: str = "5GB", **options: Any
) -> PreTrainedModel:
    """Writes a random model of the given type into `folder` and gives it, in float32, for comparison."""
    torch.manual_seed(seed)
    tokenizer = ascii_tokenizer()
    config = AutoConfig.for_model(model_type, **{**SHAPE, "vocab_size": tokenizer.get_vocab_size(), **options})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # biases and norms start as zeros and ones, which would hide a wrong one
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHATML, "bos_token": CONTROL[1], "eos_token": CONTROL[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return model
