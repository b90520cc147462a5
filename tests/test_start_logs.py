"""`--from-log` against start-up logs that other people published, and against files that are none."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import test_published_logs as other_logs
import test_vllm_published as vllm_published

from kvctl.engines import engine as find_engine
from kvctl.model import build_spec
from kvctl.options import read_asked
from kvctl.size import SizePlan
from kvctl.spec import ModelSpec
from kvctl.startlog import LogReport, StartLog, explain, read_log

DATA = Path(__file__).parent / "data" / "start_logs.txt"


class Published(NamedTuple):
    """One published log."""

    where: str
    facts: dict[str, str]
    text: str


def published() -> list[Published]:
    out = []
    for block in DATA.read_text().split("\n== ")[1:]:
        head, _, text = block.partition("\n---\n")
        where, *rows = head.splitlines()
        out.append(Published(where, dict(row.split(": ", 1) for row in rows), text))  # type: ignore[misc]
    return out


LOGS = published()


def read(tmp_path: Path, text: str | bytes) -> StartLog:
    path = tmp_path / "server.log"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_log(str(path))


def asked(log: StartLog, facts: dict[str, str]) -> tuple[ModelSpec, SizePlan]:
    """The model and the plan as the command line makes them of a log."""
    rules = facts.get("rules", log.rules)
    words = " ".join(filter(None, (facts.get("env"), log.engine_args, facts.get("args"))))
    said = read_asked(engine=rules, engine_args=words, models=[facts["model"]], revision=None, ctx=None, dtype="auto",
                      kv_dtypes=("auto", "auto", "auto"), overrides=(), flags=())  # fmt: skip
    spec = build_spec(said.find(facts["model"], "catalogue"), said.overrides, checked=False)
    engine = find_engine(rules)
    key, value = said.cache_formats(engine)
    return spec, SizePlan(engine=engine, contexts=said.contexts, own_maximum=said.own_maximum, dtype=said.dtype, key=key,
                          value=value, serving=said.serving(engine, strict=True), notes=said.notes)  # fmt: skip


def report(log: StartLog, facts: dict[str, str]) -> LogReport:
    return explain(log, *asked(log, facts))


@pytest.mark.parametrize("entry", LOGS, ids=lambda entry: entry.where)
def test_reads_a_published_log(tmp_path: Path, entry: Published) -> None:
    log = read(tmp_path, entry.text)
    assert log.complete
    for reading in filter(None, entry.facts.get("reads", "").split("; ")):
        name, _, text = reading.partition("=")
        if name == "version":
            assert log.version == text
        else:
            assert text.replace(" GB", " GiB") in [figure.text for figure in log.all(name)], (name, log.all(name))
    for reading in filter(None, entry.facts.get("where", "").split("; ")):
        name, _, where = reading.partition("=")
        assert log.all(name)[0].where == where
    for words in filter(None, entry.facts.get("says", "").split("; ")):
        assert words in log.engine_args


@pytest.mark.parametrize("entry", LOGS, ids=lambda entry: entry.where)
def test_explains_a_published_log(tmp_path: Path, entry: Published) -> None:
    log = read(tmp_path, entry.text)
    found = report(log, entry.facts)
    wrong = "; ".join(f"{row.name}: {row.cause or '?'}" for row in found.rows if row.agrees is False) or "agrees"
    assert wrong == entry.facts["verdict"], [row.to_dict() for row in found.rows]
    assert any(row.agrees is not None for row in found.rows) or found.refused is not None, found


# -- the logs of the other tests, line by line as they were printed --------------------------------


@pytest.mark.parametrize("row", vllm_published.LOGS, ids=lambda row: f"{row.version}-{row.model}-{row.memory:g}")
def test_vllm_logs_agree(tmp_path: Path, row: vllm_published.Log) -> None:
    concurrency = f"Maximum concurrency for {row.length:,} tokens per request: {row.concurrency}x"
    tokens = f"GPU KV cache size: {row.tokens:,} tokens" if row.tokens is not None else ""
    memory = f"{row.memory:.2f}" if len(f"{row.memory:g}") < 8 else f"{row.memory:.9f}"
    log = read(tmp_path, f"(EngineCore pid=1) INFO [gpu_worker.py:1] Available KV cache memory: {memory} GiB\n{tokens}\n"
               + (concurrency if row.concurrency is not None else ""))  # fmt: skip
    command = row.command.replace("DRAFTER", vllm_published.drafter(tmp_path))
    env, found, rest = command.rpartition("vllm serve ")
    args = (rest if found else command).replace("python3 -m vllm.entrypoints.openai.api_server", "")
    length = "" if "--max-model-len" in args else f" --max-model-len {row.length}"
    model = row.model or "MiniMaxAI/MiniMax-M2.5"
    if not found or row.model is None:
        env = ""
    facts = {"model": model, "rules": f"vllm@{row.version}", "args": args.replace("\\\n", " ") + length, "env": env}
    rows = report(log, facts).rows
    assert {line.name for line in rows if line.agrees is False} == set(), rows
    assert {line.name for line in rows if line.agrees} == {
        name for name, said in (("capacity", row.tokens), ("concurrency", row.concurrency)) if said is not None
    }


@pytest.mark.parametrize("row", vllm_published.REFUSALS, ids=lambda row: f"{row.version}-{row.model}")
def test_vllm_refusals_agree(tmp_path: Path, row: vllm_published.Refusal) -> None:
    available = f"{row.available:.2f}" if row.available is not None else ""
    text = (f"ValueError: To serve at least one request with the model's max seq len ({row.length}), ({row.needed} GiB KV cache is "
            "needed, which is larger than the available KV cache memory")  # fmt: skip
    text += f" ({available} GiB). " if available else ". "
    if row.longest is not None:
        text += f"Based on the available memory, the estimated maximum model length is {row.longest}."
    command = row.command.replace("DRAFTER", vllm_published.drafter(tmp_path))
    facts = {"model": row.model, "rules": f"vllm@{row.version}", "args": f"{command} --max-model-len {row.length}"}
    found = report(read(tmp_path, text), facts)
    assert found.agrees, found.rows
    assert found.refused is not None
    assert found.refused.kind == "too long"
    if row.longest is not None:
        # A length that fits is named, within what the printed memory leaves open.
        least = int(next(words for words in found.refused.fits if "--max-model-len" in words).split()[1])
        assert row.longest * 0.99 < least <= row.longest


@pytest.mark.parametrize("row", other_logs.SGLANG, ids=lambda row: row[0])
def test_sglang_logs_agree(tmp_path: Path, row: tuple[str, str, str, str, list[str]]) -> None:
    _, version, model, flags, lines = row
    log = read(tmp_path, "\n".join(f"[2026-01-01 00:00:00 TP{rank}] {line}" for rank in (0, 1) for line in lines))
    found = report(log, {"model": model, "rules": f"sglang@{version}", "args": flags})
    assert found.agrees, found.rows
    assert found.rows


@pytest.mark.parametrize("row", other_logs.LLAMA_CPP, ids=lambda row: row[0])
def test_llama_cpp_logs_agree(tmp_path: Path, row: tuple[str, str, str, str, list[str]]) -> None:
    _, build, model, flags, lines = row
    log = read(tmp_path, "\n".join(lines))
    facts = {"model": model, "rules": f"llama.cpp@{build}" if build else "llama.cpp", "args": flags}
    found = report(log, facts)
    assert all(line.agrees for line in found.rows), found.rows
