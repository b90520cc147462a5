"""Predicted speeds beside 1,147 published records (tests/data/speed.jsonl, each with its source).

The coefficients were fitted on these, so what is held here is that they are the ones, that ranges hold what they claim and that no
prediction beats the hardware; how far off unseen combinations are is in docs/speed.md, from fits that had not seen them.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import check_speed  # noqa: E402
import speed_points  # noqa: E402

from kvctl.formats import BF16, plain  # noqa: E402
from kvctl.hardware.table import find  # noqa: E402
from kvctl.model import build_spec  # noqa: E402
from kvctl.sources import catalogue  # noqa: E402
from kvctl.spec import Formats  # noqa: E402
from kvctl.speed import Setup, prepare  # noqa: E402

DATA = str(ROOT / "tests/data/speed.jsonl")


@cache
def observed() -> list[Any]:
    found, left = speed_points.load(DATA)
    assert not left, left
    return found


@cache
def rows() -> list[dict[str, Any]]:
    return [check_speed.judge(one) for one in observed()]


def test_every_record_can_be_predicted() -> None:
    records = [json.loads(line) for line in Path(DATA).read_text().splitlines()[1:]]
    assert len(records) == 1147
    # Three have no lengths (a chat benchmark that does not say them), and so no figure that depends on these.
    assert len({one.point.id for one in observed()}) >= 1143


def test_errors_and_ranges_are_what_is_claimed() -> None:
    assert median(row["error_percent"] for row in rows()) < 25
    assert sum(row["inside"] for row in rows()) / len(rows()) > 0.9


@pytest.mark.parametrize("phase", ["tpot", "ttft", "rate", "prefill"])
def test_no_phase_is_far_off(phase: str) -> None:
    mine = [row for row in rows() if row["phase"] == phase]
    assert median(row["error_percent"] for row in mine) < 25
    assert sum(row["inside"] for row in mine) / len(mine) > 0.9


def test_nothing_is_faster_than_the_hardware() -> None:
    for one, row in zip(observed(), rows(), strict=True):
        if one.kind == "token":
            # A step reads its weights and its part of the cache once.
            least = float(one.step.weights + one.step.cache)
            assert one.requests / row["predicted"] >= least, row
        if one.kind == "prompt":
            assert one.requests / row["predicted"] >= float(one.prompt.operations + one.prompt.attention), row
        if one.kind in ("first", "between"):
            least = float(one.prompt.operations if one.kind == "first" else one.step.weights + one.step.cache)
            assert row["predicted"] / 1000 >= least, row


def test_what_a_fit_had_not_seen_is_within_what_is_promised() -> None:
    """From the fit itself: of combinations of model, GPU and engine that were left out of it."""
    errors = json.loads((ROOT / "kvctl/data/speed.json").read_text())["errors"]
    every = next(row for row in errors if row["name"] == "all figures")
    assert every["figures"] == len(observed())
    assert every["median"] < 25
    assert every["inside"] > 90
    assert all(row["median"] < 50 for row in errors if row["by"] == "never seen")


@pytest.mark.parametrize(("engine", "card", "batches"), [("llama.cpp", "L40S", False), ("vllm", "H100 SXM", True)])
def test_batches_that_nobody_measured_are_less_certain(engine: str, card: str, batches: bool) -> None:
    """All of llama.cpp's figures of several requests at once are of one card, the DGX Spark's; vLLM's are of many."""
    records = [json.loads(line) for line in Path(DATA).read_text().splitlines()[1:]]
    named = {"llama.cpp": "llama.cpp", "vllm": "vLLM"}[engine]
    of_several = {one["gpu"] for one in records if one["engine"] == named and (one["concurrency"] or 1) > 2}
    assert any(card.split()[0] in name for name in of_several) == batches
    setup = Setup(
        build_spec(catalogue.find("meta-llama/Llama-3.1-8B-Instruct")),
        engine,
        find(card)[0],
        "bf16",
        Formats(BF16, plain(BF16), plain(BF16)),
    )
    prepared = prepare(setup)
    one, eight = prepared.at(1000, 100, 1), prepared.at(1000, 100, 8)
    assert eight.validated.endswith(", of one request at a time") != batches
    assert not one.validated.endswith("at a time")
    wide, narrow = (found.tpot.high / found.tpot.mid for found in (eight, one))
    assert wide == pytest.approx(narrow) if batches else wide > 2 * narrow
    # Eight on eight replicas are one at a time again.
    assert prepare(setup.replace(replicas=8)).at(1000, 100, 8).validated == one.validated


def test_a_file_in_the_form_of_a_list_reads_the_same(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in Path(DATA).read_text().splitlines()]
    named = lines[0]["sources"]
    plain = tmp_path / "points.json"
    plain.write_text(json.dumps([{**record, "source": named[record["source"]]} for record in lines[1:60]]))
    found, left = speed_points.load(str(plain))
    assert not left
    assert [(one.metric, one.value) for one in found] == [(one.metric, one.value) for one in observed()[: len(found)]]


def test_records_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    record = json.loads(Path(DATA).read_text().splitlines()[1])
    path = tmp_path / "points.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({**record, **change})
            for change in ({"model": "no/such"}, {"gpu": "Nothing 9000"}, {"weights": "Q9_X"})
        )
    )
    found, left = speed_points.load(str(path))
    assert not found
    assert left == {"model no/such": 1, "gpu Nothing 9000": 1, "weights Q9_X": 1}
