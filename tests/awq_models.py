"""Small models with random weights, of every architecture that AWQ is known for, as folders on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "head_dim": 16, "max_position_embeddings": 256, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 16, "decoder_sparse_step": 1,
}  # fmt: skip
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


def model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A model in float32 whose norms and biases are as random as its matrices."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.CONFIG_MAPPING[model_type](**SIZES | changes)
    told = {"experts_implementation": "eager"} if model_type in _MIXTURES else {}
    made = transformers.AutoModelForCausalLM.from_config(config, **told).eval()
    for name, parameter in made.named_parameters():
        around = 0 if model_type.startswith("gemma") or name.endswith("bias") else 1
        if parameter.dim() == 1:
            parameter.data = 0.3 * torch.randn_like(parameter) + around
    return made


def save(folder: Path, model_type: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """A model's folder, with a tokenizer of single characters."""
    made = model(model_type, seed, **changes)
    made.save_pretrained(folder)
    tokenizer(made.config.vocab_size).save_pretrained(folder)
    return folder


def tokenizer(count: int) -> Any:
    """One of so many tokens: each a character."""
    import tokenizers
    import transformers

    characters = ["?", *(chr(code) for code in range(32, 32 + count - 1) if chr(code) != "?")][:count]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")
