"""What formats cost: published figures chosen by model and size, measured ones before them, unknown never nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvctl.engines import ENGINES
from kvctl.errors import ConfigError, SourceError
from kvctl.model import build_spec
from kvctl.recommend import measured
from kvctl.recommend.quality import Figure, Loss, Measured, Quality, address, figures, plain_name, published, quality_of
from kvctl.sources import catalogue
from kvctl.speed import Range
from kvctl.weight_formats import FORMATS, GGUF_BITS

LARGE = Quality("Qwen/Qwen3-32B", 32_800_000_000, "bf16")


def percent(loss: Loss) -> Range:
    assert loss.percent is not None
    return loss.percent


@pytest.mark.parametrize("kind", ["weights", "cache", "techniques"])
def test_every_figure_has_a_source_that_can_be_opened(kind: str) -> None:
    for row in figures(kind):
        assert "(http" in address(row.source) or "(docs/" in address(row.source)
        assert row.metric in ("accuracy", "perplexity")
        assert row.original > 0
        assert row.value > 0
        assert math.isfinite(row.percent)
    for name in ("docs/quantize.md", "docs/techniques.md"):
        assert (Path(__file__).parent.parent / name).exists()


def test_every_format_of_the_table_exists() -> None:
    known = {fmt.name for fmt in FORMATS} | set(GGUF_BITS) | {"q4_0", "q4_1", "q5_0", "q5_1"}  # llama.cpp's first types
    assert {name for row in figures("weights") for name in row.formats} <= known
    words: set[str] = {"quanto-int4", "hqq-int4", "int8", "int4", "mxfp4", "q8_0/q4_0"}
    for engine in ENGINES:
        planner = engine.planner if engine.plans else None
        words |= {str(name) for name in getattr(planner, "KV_DTYPES", {})}
    from kvctl.engines.llama_cpp.plan import KV_TYPES
    from kvctl.engines.sglang.pools import KV_DTYPES as SGLANG
    from kvctl.engines.vllm.specs import KV_DTYPES as VLLM

    words |= set(KV_TYPES) | set(SGLANG) | set(VLLM)
    assert {name for row in figures("cache") for name in row.formats} <= words


def test_a_loss_is_a_share_of_the_original() -> None:
    # A score of 79.51 that becomes 79.16: (79.51 - 79.16) / 79.51 = 0.440%.
    score = Figure(("fp8",), "m", (70.0, 70.0), "accuracy", "b", 79.51, 79.16, "s")
    assert score.percent == pytest.approx(0.4402, abs=1e-4)
    # llama.cpp's README prints the ratio of mean perplexities of q4_K_M and f16, Llama 3 8B: 1.028160.
    rows = [row for row in figures("weights") if row.formats == ("q4_k_m",) and row.model == "Llama-3-8B"]
    assert any(row.percent == pytest.approx(2.8160, abs=1e-3) for row in rows)
    bound = score.replace(most=True)
    assert bound.span == (0.0, score.percent)
    assert score.replace(error=0.1).span == pytest.approx((0.2402, 0.6402), abs=1e-4)


def test_large_models_are_judged_by_large_ones() -> None:
    # Qwen's table: 72B 81.3 -> 80.4, 0.5B 34.4 -> 31.1.
    large = Quality("org/some-70b", 70_000_000_000, "bf16").weights("awq")
    assert "Qwen2-72B" in large.basis
    assert "Qwen2-0.5B" not in large.basis
    small = Quality("org/some-0.4b", 400_000_000, "bf16").weights("awq")
    assert percent(small).mid > percent(large).mid


def test_ten_times_the_size_still_counts_and_more_does_not() -> None:
    # Llama-3-8B and Llama-2-7b are the only ones with Q6_K; 8.03e9 × 10 = 80.3e9.
    assert Quality("x", 80_000_000_000, "bf16").weights("q6_k").percent is not None
    assert Quality("x", 81_000_000_000, "bf16").weights("q6_k").percent is None


def test_the_same_model_goes_before_others() -> None:
    loss = Quality("meta-llama/Meta-Llama-3-70B-Instruct", 70_600_000_000, "bf16").weights("fp8")
    assert percent(loss).mid == pytest.approx(100 * (79.51 - 79.16) / 79.51)
    assert loss.sure == "low"  # one figure
    assert plain_name("meta-llama/Meta-Llama-3-70B-Instruct") == "llama-3-70b-instruct"


def test_accuracy_goes_before_perplexity() -> None:
    assert LARGE.weights("gptq").metric == "accuracy"  # with Llama 2's perplexities in the table too
    assert LARGE.weights("q4_k_m").metric == "perplexity"  # nothing else there


def test_16_bits_and_the_own_format_cost_nothing_and_say_why() -> None:
    assert percent(LARGE.weights("bf16")) == Range(0.0, 0.0, 0.0)
    assert LARGE.weights("bf16").source
    deepseek = Quality("deepseek-ai/DeepSeek-V3", 671_000_000_000, "fp8-block")
    assert percent(deepseek.weights("fp8-block")).high == 0.0
    assert percent(LARGE.weights("fp8-block")).high > 0.0
    assert percent(LARGE.cache("auto")).high == 0.0


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("Qwen3-32B", "bf16"),
        ("DeepSeek-V3", "fp8-block"),
        ("gpt-oss-120b", "mxfp4"),
        ("RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", "fp8-channel"),
    ],
)
def test_the_own_format_is_what_the_checkpoint_says(name: str, own: str) -> None:
    found = quality_of(build_spec(catalogue.find(name)))
    assert found.own_weights == own
    assert percent(found.weights(own)).high == 0.0


def test_parameters_are_the_files_or_counted() -> None:
    # Their cards: 32.8B and 671B, and 14B more of the module that predicts a second token.
    assert quality_of(build_spec(catalogue.find("Qwen3-32B"))).parameters == pytest.approx(32.8e9, rel=0.01)
    assert quality_of(build_spec(catalogue.find("DeepSeek-V3"))).parameters == pytest.approx(684.5e9, rel=0.02)


def test_figures_of_large_models_say_nothing_of_small_ones() -> None:
    assert "NVIDIA" in Quality("x", 70_000_000_000).cache("nvfp4").source
    assert "NVIDIA" not in Quality("x", 1_000_000_000).cache("nvfp4").source


@pytest.mark.parametrize("name", ["fp4", "nf4", "iq9_x"])
def test_unknown_is_unknown(name: str) -> None:
    loss = LARGE.weights(name)
    assert loss.percent is None
    assert loss.source
    assert loss.allowed(100.0) == "unknown"
    assert LARGE.both(name, "fp8").percent is None
    assert LARGE.both("fp8", "turboquant_k8v4").percent is None


def test_a_limit_decides_at_both_sides() -> None:
    loss = Loss(Range(0.2, 1.0, 3.0), "accuracy", "s")
    assert loss.allowed(0.99) == "no"
    assert loss.allowed(1.0) == "depends"
    assert loss.allowed(2.99) == "depends"
    assert loss.allowed(3.0) == "yes"


def test_a_limit_of_one_percent_tells_8_bits_from_4() -> None:
    assert LARGE.weights("fp8").allowed(1.0) == "yes"
    assert LARGE.weights("w8a8").allowed(1.0) == "depends"  # 98.7 and 98.8% of HumanEval stand beside 105.4
    assert LARGE.weights("awq").allowed(1.0) == "no"
    assert LARGE.weights("mxfp4").allowed(5.0) == "no"


def test_two_losses_go_one_upon_the_other() -> None:
    one = Measured("m", 10, {"awq": Loss(Range(7.0, 7.3, 8.0), "perplexity", "a", True, "high")}, {
        "int4": Loss(Range(6.0, 6.5, 7.0), "perplexity", "b", True, "medium")})  # fmt: skip
    both = Quality("m", 10, "bf16", (one,)).both("awq", "int4")
    # 1.073 × 1.065 = 1.142745; 1.07 × 1.06 = 1.1342; 1.08 × 1.07 = 1.1556
    assert percent(both).mid == pytest.approx(14.2745)
    assert percent(both).low == pytest.approx(13.42)
    assert percent(both).high == pytest.approx(15.56)
    assert both.measured
    assert both.sure == "medium"
    # Measured together, that is what counts.
    together = Loss(Range(16.0, 16.8, 17.0), "perplexity", "c", True, "high")
    assert Quality("m", 10, "bf16", (one.replace(both={("awq", "int4"): together}),)).both("awq", "int4") == together


def test_keys_and_values_in_two_formats_lose_no_more_than_the_worse() -> None:
    pair, worse = LARGE.cache("q8_0/q4_0"), LARGE.cache("q4_0")
    assert percent(pair).high == percent(worse).high
    assert percent(pair).low == 0.0
    assert LARGE.cache("q8_0/q8_0") == LARGE.cache("q8_0")
    assert LARGE.cache("q8_0/f16").sure == "low"


def test_published_says_what_it_rests_on() -> None:
    loss = published("weights", "fp8-block", "x", 70_000_000_000)
    assert "finer" in loss.source  # it is judged by coarser scales, which can only be worse
    assert loss.sure == "high"
    # Of others that stand in for a format nothing is that sure.
    assert published("weights", "nf4-dq", "x", None).sure == "low"
    assert loss.allowed(1.0) in ("yes", "depends")
    # One figure alone is taken at its worst: 0.4% with an error of 0.5 may be 1.4%.
    one = Loss(Range(-0.6, 0.4, 1.4), "accuracy", "a", False, "low")
    assert (one.allowed(1.0), one.allowed(1.4), one.replace(sure="medium").allowed(1.0)) == ("no", "yes", "depends")
    assert json.dumps(loss.to_dict())


# -- saved results --------------------------------------------------------------------------


def quality(value: float | None, error: float | None = 0.1) -> dict[str, Any]:
    return {"tokens": 2040, "perplexity_change_percent": {"value": value, "standard_error": error, "standard_error_of_tokens": None}}  # fmt: skip


def quantized(**more: Any) -> dict[str, Any]:
    def row(name: str, found: Any, caches: Any = ()) -> dict[str, Any]:
        return {"format": name, "parameters": 134_515_008, "judged": None if found is None else {"quality": found},
                "caches": [{"name": key, "quality": one} for key, one in caches]}  # fmt: skip

    return {
        "schema": "kvctl.quantize/1", "model": {"id": "HuggingFaceTB/SmolLM2-135M-Instruct"}, "kv": None,
        "results": [row("original", None, [("plain", None), ("int4", quality(6.5))]),
                    row("awq", quality(7.3), [("plain", quality(7.3)), ("int4", quality(16.8))]),
                    row("fp8", quality(0.2)), row("int8-w8a8", quality(0.4)), row("rtn", quality(9.0))],
    } | more  # fmt: skip


def saved(tmp_path: Path, data: Any) -> str:
    path = tmp_path / "result.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_a_saved_result_goes_before_published_figures(tmp_path: Path) -> None:
    result = measured.load(saved(tmp_path, quantized()))
    own = Quality("SmolLM2-135M-Instruct", 134_515_008, "bf16", (result,))
    assert own.weights("awq").measured
    assert percent(own.weights("awq")) == Range(7.3 - 0.2, 7.3, 7.3 + 0.2)
    assert own.weights("fp8-channel").measured  # what kvctl quantize calls fp8
    assert not own.weights("fp8").measured  # one scale for each tensor: another format
    assert percent(own.weights("w8a8")).mid == 0.4
    assert percent(own.cache("int4")).mid == 6.5
    assert percent(own.both("awq", "int4")).mid == 16.8
    # Of another model it says nothing.
    assert not Quality("Qwen/Qwen3-32B", 32_800_000_000, "bf16", (result,)).weights("awq").measured
    # Another name of as many parameters is the same model.
    assert Quality("./folder", 134_515_008, "bf16", (result,)).weights("awq").measured


def test_formats_of_the_cache_alone(tmp_path: Path) -> None:
    kv = {"results": [{"name": "plain", "quality": None}, {"name": "fp8, scale 1.0", "quality": quality(0.8)}]}
    result = measured.load(saved(tmp_path, quantized(results=[], kv=kv)))
    assert percent(result.caches["fp8"]).mid == 0.8


def test_a_profile(tmp_path: Path) -> None:
    rows = [{"name": "plain", "quality": None}, {"name": "q8_0:values=q4_0", "quality": quality(2.0, None)},
            {"name": "int2", "quality": quality(None, None)}]  # fmt: skip
    data = {
        "schema": "kvctl.profile/1",
        "model": {"id": "m"},
        "weights": {"parameters": 5},
        "techniques": {"rows": rows},
    }
    result = measured.load(saved(tmp_path, data))
    assert result.parameters == 5
    assert result.caches["q8_0/q4_0"].sure == "low"  # without a standard error
    assert result.caches["int2"].allowed(1e9) == "no"  # beyond all bounds


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "is cut short"),
        ({"schema": "kvctl.size/1"}, "holds kvctl.size/1"),
        ({}, "holds no schema"),
        (quantized(results=[]), "no measured quality"),
        (quantized(results=[{"format": "awq"}]), "is damaged"),
        (quantized(model=[]), "is damaged"),
        (quantized(results=[{"format": "awq", "parameters": "many", "judged": None, "caches": []}]), "is damaged"),
        (quantized(results=[{"format": "awq", "parameters": 1, "judged": {"quality": quality(True)}, "caches": []}]), "is damaged"),
    ],
)  # fmt: skip
def test_what_is_no_saved_result_is_refused(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        measured.load(saved(tmp_path, data))
    assert caught.value.hint
    assert "config.json" not in (caught.value.hint or "")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        measured.load(str(tmp_path / "none.json"))
    with pytest.raises(SourceError):
        measured.load("\0")


def test_what_kvctl_quantize_writes_is_what_is_read(tmp_path: Path) -> None:
    from kvctl.measure.quality import Scores
    from kvctl.reports import ModelInfo
    from kvctl.weights.judge import CacheJudged, Judged
    from kvctl.weights.report import Cell, QuantizeReport, Row

    scores = Scores()
    for token in range(400):  # every token half as likely: the perplexity doubles
        scores.add(token // 20, -1.0, -1.0 - math.log(2), 0.1, True)
    judged = Judged(tmp_path, "transformers", "float32", 400, 5.4, scores, (), "", None, 1.0, 1.0, None, 10, None, ())
    cell = Cell("int8", 10, CacheJudged("int8", 5.4, scores, 10, 10, None))
    model = ModelInfo("org/tiny", "llama", "local", "/x", None, {}, (), None)
    rows = (
        Row("original", "as it is", "BF16", None, 77, 100),
        Row("awq", "4 bits", "F16", 128, 77, 30, judged=judged, caches=(cell,)),
    )
    report = QuantizeReport(model, {}, {}, rows)
    result = measured.load(saved(tmp_path, report.to_dict()))
    assert (result.model, result.parameters) == ("org/tiny", 77)
    assert percent(result.weights["awq"]).mid == pytest.approx(100.0)
    assert percent(result.both["awq", "int8"]).mid == pytest.approx(100.0)


def test_what_kvctl_profile_writes_is_what_is_read() -> None:
    schema = json.loads((Path(__file__).parent.parent / "kvctl/data/schemas/kvctl.profile-1.json").read_text())
    row = schema["properties"]["techniques"]["properties"]["rows"]["items"]
    assert {"name", "quality"} <= set(row["required"])
    quality_keys = row["properties"]["quality"]["properties"]
    assert {"tokens", "perplexity_change_percent"} <= set(quality_keys)
    assert {"value", "standard_error"} <= set(quality_keys["perplexity_change_percent"]["required"])
    assert {"techniques", "weights", "model"} <= set(schema["required"])
    assert "parameters" in schema["properties"]["weights"]["properties"]
