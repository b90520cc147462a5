"""Which models answer with text, one token after another: what is recommended is for these.

An embedding model or a reranker reads a prompt once and decodes nothing; an encoder-decoder reads speech, or its text, with an
encoder whose time is in no prediction here.
"""

from __future__ import annotations

import re

from kvctl.spec import CrossAttention, ModelSpec

_HEADS = (
    ("ForSequenceClassification", "classifies or ranks"),
    ("ForTokenClassification", "classifies tokens"),
    ("ForQuestionAnswering", "marks answers in a text"),
    ("ForMaskedLM", "fills in masks"),
    ("RewardModel", "scores answers"),
)
"""Ends of the names of transformers' classes, and what such a model does."""
_BARE = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "bert", "roberta", "xlm-roberta",
         "camembert", "electra")  # fmt: skip
"""Types whose class without a head (Qwen3Model) gives hidden states alone, as checkpoints of embedding models name it."""
_EMBEDS = re.compile(r"(?<![a-z])(?:embedding|embed(?![a-z]))|^(?:bge|gte|e5|multilingual-e5)-", re.IGNORECASE)
_RANKS = re.compile(r"(?<![a-z])rerank", re.IGNORECASE)
"""Names say it where the class does not: Qwen3-Embedding and Qwen3-Reranker are Qwen3ForCausalLM."""
_SPEECH = ("whisper", "speech_to_text", "speecht5", "moonshine", "moonshine_streaming", "cohere_asr", "canary", "seamless_m4t",
           "seamless_m4t_v2", "speech-encoder-decoder", "dia", "musicgen", "musicgen_decoder", "musicgen_melody_decoder", "pop2piano")  # fmt: skip


def other_than_text(spec: ModelSpec) -> str:
    """What a model is instead of one that answers with text token by token; empty where it is such a one."""
    named = spec.config.get("architectures")
    classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for end, does in _HEADS:
        if any(name.endswith(end) for name in classes):
            return f"a model that {does} ({classes[0][:60]})"
    name = re.split(r"[/\\]", spec.id.rstrip("/\\"))[-1]
    if _RANKS.search(name):
        return "a reranker, by its name"
    if _EMBEDS.search(name):
        return "an embedding model, by its name"
    bare = re.sub("[_-]", "", spec.model_type) + "model"
    if spec.model_type in _BARE and [each.lower() for each in classes] == [bare]:
        return f"an embedding model ({classes[0][:60]} has no head that gives tokens)"
    if spec.model_type in _SPEECH:
        return "an encoder-decoder for speech or sound"
    if spec.cross_input == "encoder" and spec.keeps(CrossAttention):
        return "an encoder-decoder"
    return ""
