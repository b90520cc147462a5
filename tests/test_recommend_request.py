"""What a request may ask for, and what it is told where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.engines import engine
from kvctl.errors import UsageError
from kvctl.hardware import read_gpus
from kvctl.model import build_spec, shape_spec
from kvctl.recommend.kinds import other_than_text
from kvctl.recommend.request import Ask, ask
from kvctl.sources import catalogue
from kvctl.spec import ModelSpec

MODEL = build_spec(catalogue.find("Qwen/Qwen3-32B"))
"""Its configuration names 40,960 tokens."""


def asked(spec: ModelSpec = MODEL, gpus: str = "2xH100", **more: Any) -> Ask:
    return ask(spec, read_gpus(gpus), **more)


def test_what_is_named_stays_and_nothing_is_assumed() -> None:
    found = asked(context=16_384, prompt=8192, answer=1024, concurrency=8, nodes=2, ttft=2.0, tpot=0.05, goal="latency")
    assert (found.gpus, found.nodes, found.all_gpus) == (2, 2, 4)
    assert (found.context, found.prompt, found.answer, found.concurrency, found.rate) == (16_384, 8192, 1024, 8, None)
    assert (found.ttft, found.tpot, found.goal) == (2.0, 0.05, "latency")
    assert not [note for note in found.notes if "--ctx" in note or "at a time" in note]


def test_what_is_left_out_is_filled_in_and_said() -> None:
    found = asked()
    # 32,768 tokens, for the model takes more; an eighth of them is the answer.
    assert (found.context, found.prompt, found.answer, found.concurrency) == (32_768, 28_672, 4096, 1)
    assert sum(word in " ".join(found.notes) for word in ("--ctx", "an eighth", "--concurrency")) == 3


def test_lengths_follow_from_each_other() -> None:
    assert asked(prompt=3000, answer=1000).context == 4000
    assert asked(context=4096, prompt=3000).answer == 1096
    assert asked(context=4096, answer=96).prompt == 4000


def test_engines_are_in_the_order_of_the_table_or_as_named() -> None:
    assert [one.name for one in asked().engines] == ["vllm", "sglang", "tensorrt-llm", "llama.cpp"]
    assert [one.name for one in asked(engines=[engine("llama.cpp"), engine("vllm")]).engines] == ["llama.cpp", "vllm"]


@pytest.mark.parametrize(
    ("more", "message", "hint"),
    [
        ({"context": 65_536}, "65,536 tokens are more than the 40,960", "--set max_position_embeddings=65536"),
        ({"context": 2048, "prompt": 2000, "answer": 100}, "do not fit in 2,048", "--ctx 2100"),
        ({"context": 2048, "prompt": 2048}, "leaves no room for an answer", "--ctx 2049"),
        ({"context": 0}, "--ctx: 0 tokens", "at least 1"),
        ({"context": 1}, "has no answer", "--ctx 2"),
        ({"concurrency": 0}, "--concurrency 0", "from 1"),
        ({"concurrency": 4, "rate": 1.0}, "--concurrency and --rate", "one of them"),
        ({"rate": 0.0}, "--rate", "more than 0"),
        ({"rate": float("nan")}, "--rate", "more than 0"),
        ({"ttft": -1.0}, "--slo ttft", "more than 0"),
        ({"tpot": 0.0}, "--slo tpot", "more than 0"),
        ({"goal": "fun"}, "unknown goal 'fun'", "cost, latency"),
        ({"max_quality_loss": -1.0}, "--max-quality-loss", "0 or more"),
        ({"nodes": 0}, "--nodes 0", "from 1"),
        ({"engines": [engine("ideal")]}, "--engine ideal", "vllm, sglang"),
        ({"gpus": "H100,A100"}, "GPUs of several kinds", "each kind alone"),
        ({"gpus": "cpu:64GiB", "nodes": 2}, "cpu is one host", "leave --nodes out"),
        ({"gpus": "65xH100"}, "65 GPUs in one node", "--nodes"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_a_way_out(more: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        asked(**more)
    assert message in error.value.message
    assert hint in (error.value.hint or "")


def test_no_gpu_at_all() -> None:
    with pytest.raises(UsageError, match="no GPU to run on"):
        ask(MODEL, ())


def test_a_bare_shape_has_no_weights_to_serve() -> None:
    with pytest.raises(UsageError, match="bare shape"):
        asked(shape_spec(80, 8, 128))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("openai/whisper-large-v3", "for speech"), ("google/flan-t5-xl", "an encoder-decoder"), ("Qwen/Qwen3-Embedding-0.6B", "an embedding model"),
     ("intfloat/e5-mistral-7b-instruct", "an embedding model"), ("Alibaba-NLP/gte-Qwen2-7B-instruct", "an embedding model")],
)  # fmt: skip
def test_models_that_answer_with_no_text_are_refused(name: str, kind: str) -> None:
    with pytest.raises(UsageError, match=kind) as caught:
        asked(build_spec(catalogue.find(name)))
    assert caught.value.hint == f"kvctl size {name} says what memory it takes"


@pytest.mark.parametrize(
    ("id_", "kind", "classes", "other"),
    [
        ("m", "qwen3", ["Qwen3ForCausalLM"], ""),
        ("./Qwen3-Reranker-0.6B", "qwen3", ["Qwen3ForCausalLM"], "reranker"),
        ("a/embeddinggemma-300m", "gemma3_text", ["Gemma3TextModel"], "embedding"),
        ("m", "gemma3_text", ["Gemma3TextModel"], "embedding"),
        ("m", "mistral", ["MistralModel"], "embedding"),
        ("m", "xlm-roberta", ["XLMRobertaForSequenceClassification"], "classifies or ranks"),
        ("m", "xlm-roberta", ["XLMRobertaModel"], "embedding"),
        ("m", "llama", ["LlamaForSequenceClassification"], "classifies or ranks"),
        # What answers with text: classes without "CausalLM", names with parts of such words, images by cross attention.
        ("zai-org/chatglm3-6b", "chatglm", ["ChatGLMModel"], ""),
        ("OpenGVLab/InternVL2-8B", "internvl_chat", ["InternVLChatModel"], ""),
        ("gpt2", "gpt2", ["GPT2LMHeadModel"], ""),
        ("me/embedded-assistant-7b", "llama", ["LlamaForCausalLM"], ""),
        ("me/bridge5-7b", "llama", [], ""),
        ("m", "llama", None, ""),
    ],
)
def test_what_a_model_is_follows_from_its_class_or_name(id_: str, kind: str, classes: Any, other: str) -> None:
    found = other_than_text(MODEL.replace(id=id_, model_type=kind, config={"architectures": classes}))
    assert (other in found) if other else found == ""


def test_images_by_cross_attention_are_no_encoder_decoder() -> None:
    assert other_than_text(build_spec(catalogue.find("meta-llama/Llama-3.2-11B-Vision-Instruct"))) == ""


def test_a_host_is_asked_as_one() -> None:
    found = asked(gpus="cpu:64GiB", context=4096)
    assert (found.gpus, found.all_gpus, found.device.kind) == (0, 0, "cpu")
