"""--until-oom: what tries that end in every way mean, that nothing outlives the search, and real models until memory ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.formats import FP32
from kvctl.measure import oom
from kvctl.measure.load import Wanted
from kvctl.measure.oom import until_oom
from kvctl.measure.points import Asked
from kvctl.measure.report import Try, UntilOom
from kvctl.measure.run import Now, ProfilePlan, Progress
from kvctl.model import build_spec
from kvctl.sources import Found
from kvctl.spec import Provenance
from kvctl.units import GIB, MIB

posix = pytest.mark.skipif(not hasattr(os, "killpg"), reason="signals and process groups")

# A worker that answers without a model: `act` is what it does with a job of `size`.
FAKE = """
import json, os, pickle, signal, sys, time
job = pickle.load(sys.stdin.buffer)
size = job.size
def say(**told):
    sys.stdout.write(json.dumps(told) + chr(10)); sys.stdout.flush()
def ran(): say(ran=True, ended="ran", peak_bytes=size * 1000, predicted=PREDICTED, room_bytes=5)
"""

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 256,
    "max_position_embeddings": 1_000_000, "torch_dtype": "float32",
}  # fmt: skip
ROW = 16 * 2 * 16 * 128 * 4
"""Bytes of the cache a token: layers, keys and values, heads, their width, float32."""


def plan(config: dict[str, Any] | None = None, **asked: Any) -> ProfilePlan:
    spec = build_spec(Found("small", CONFIG | (config or {}), Provenance("local", "small")))
    return ProfilePlan(
        spec, Wanted(random=True, dtype=FP32), Asked(**{"contexts": (128,), "batches": (1,), "decode": 4} | asked)
    )


def heard(tried: Callable[[Try], None] = lambda _: None) -> Progress:
    return Progress(Now(), lambda _: None, tried)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., UntilOom]:
    """A search whose tries do as they are told."""

    def search(
        act: str, what: str = "ctx", predicted: int | None = None, of: ProfilePlan | None = None, **more: Any
    ) -> UntilOom:
        monkeypatch.setattr(oom, "_WORKER", ("-c", FAKE.replace("PREDICTED", str(predicted)) + act))
        seen: list[Try] = []
        found = until_oom(of or plan(), what, heard(seen.append), **more)
        assert found.tries == tuple(seen)
        assert not psutil.Process().children(recursive=True)
        return found

    return search


# -- the search -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("predicted", "true"), [(None, 1000), (100, 5000), (4000, 5000), (5000, 5000), (9000, 64)])
def test_finds_the_largest_context(fake: Any, predicted: int | None, true: int) -> None:
    found = fake(f"ran() if size <= {true} else say(ran=False, ended='out of memory')", predicted=predicted)
    assert found.largest <= true < found.first_failed
    assert found.first_failed - found.largest <= 64  # a hundredth of 5,000 is less
    assert found.predicted == predicted
    assert all(one.ran == (one.size <= true) for one in found.tries)
    assert len({one.size for one in found.tries}) == len(found.tries) <= 16


@pytest.mark.parametrize(("predicted", "true"), [(None, 1), (None, 19), (40, 37), (500, 3)])
def test_finds_the_largest_batch_exactly(fake: Any, predicted: int | None, true: int) -> None:
    found = fake(f"ran() if size <= {true} else say(ran=False, ended='out of memory')", "batch", predicted)
    assert (found.largest, found.first_failed) == (true, true + 1)
    assert "with 128 tokens each" in found.note


def test_the_models_positions_bound_the_search(fake: Any) -> None:
    found = fake("ran()", of=plan({"max_position_embeddings": 1000}), predicted=10**6)
    assert (found.largest, found.first_failed, found.predicted) == (998, None, 998)
    assert "no more positions than 1,000" in found.note
    assert [one.size for one in found.tries] == [64, 998]
    with pytest.raises(UsageError, match="beyond the 100 positions"):
        fake("ran()", "batch", of=plan({"max_position_embeddings": 100}))


def test_where_nothing_runs(fake: Any) -> None:
    found = fake("say(ran=False, ended='no room for 5 GiB')")
    assert (found.largest, found.first_failed) == (None, 64)
    assert found.tries[0].ended == "out of memory: no room for 5 GiB"


@pytest.mark.parametrize("asked", [{"what": "width"}, {"what": "ctx", "wanted": {"tensor_parallel": 2}},
                                   {"what": "ctx", "wanted": {"device": "mps"}, "memory_limit": GIB}])  # fmt: skip
def test_what_cannot_be_searched(asked: dict[str, Any]) -> None:
    base = plan()
    with pytest.raises(UsageError):
        until_oom(base.replace(wanted=base.wanted.replace(**asked.pop("wanted", {}))), asked.pop("what"), heard(),
                  **asked)  # fmt: skip


# -- ways to end ------------------------------------------------------------------------------------

ENDS = {
    "os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL: the kernel does that when memory ends",
    "os.write(2, b'terminate called: std::bad_alloc\\n'); os.abort()": "out of memory: terminate called: std::bad_alloc",
    "os.write(2, b'x\\nRuntimeError: CUDA out of memory.\\nbye\\n'); sys.exit(1)": "out of memory: RuntimeError: CUDA out of memory.",
    "os.write(2, b'libgomp: Thread creation failed: x'); sys.exit(1)": "out of memory: libgomp: Thread creation failed: x",
    "os.kill(os.getpid(), signal.SIGSEGV)": "killed by SIGSEGV",
    "os.write(2, b'what\\x1b[31m \\xff\\n'); sys.exit(3)": "ended with status 3: what[31m �",
    "sys.exit(0)": "ended with status 0",
    "print('[' * 5000)": "ended with status 0",
    "print('{}' + 'x' * 10**7)": "ended with status 0",
    "say(error='UsageError', message='too long', hint=None)": "refused: too long",
}


@posix
@pytest.mark.parametrize("act", ENDS)
def test_a_try_that_ends_badly_is_a_data_point(fake: Any, act: str) -> None:
    found = fake(f"ran() if size <= 100 else exec({act!r})")
    assert found.largest == 64
    assert {one.ended for one in found.tries if not one.ran} == {ENDS[act]}


def test_what_never_ran_is_an_error(fake: Any) -> None:
    with pytest.raises(ConfigError, match="no such type") as caught:
        fake("say(error='ConfigError', message='no such type', hint='another')")
    assert caught.value.hint == "another"
    with pytest.raises(KvctlError, match=r"a try of 64 ended with status 1: ValueError: broken"):
        fake("raise ValueError('broken')")
    with pytest.raises(KvctlError, match="boom"):  # a name that is no error of ours
        fake("say(error='ExitCode', message='boom', hint=None)")


def test_endless_output_is_not_kept(fake: Any) -> None:
    found = fake(
        "os.write(2, b'y' * 50_000_000); ran() if size <= 100 else say(ran=False, ended='out of memory')",
        of=plan({"max_position_embeddings": 130}),
    )
    assert found.largest == 64


def test_a_try_is_ended_before_the_machine_is_short(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a try "takes" memory, in a file of what is available: 8 GiB, and 10 MiB less a token."""
    reads = []

    def host() -> Any:
        reads.append(1)
        return SimpleNamespace(memory_bytes=32 * GIB, available_bytes=available[0])

    available = [8 * GIB]
    attempt = oom._attempt

    def watched(job: Any) -> Any:
        timer = threading.Timer(0.3, lambda: available.__setitem__(0, 8 * GIB - job.size * 10 * MIB))
        timer.start()
        try:
            return attempt(job)
        finally:
            timer.cancel()
            timer.join()
            available[0] = 8 * GIB

    monkeypatch.setattr(oom, "_host", host)
    monkeypatch.setattr(oom, "_attempt", watched)
    monkeypatch.setattr(oom, "_rss_reader", lambda _: lambda: 8 * GIB - available[0])
    # (8 GiB - 1 GiB, a thirty-second of 32) / 10 MiB = 716.8 tokens
    found = fake("time.sleep(0.8 if size < 717 else 60); ran()")
    assert found.largest <= 716 < found.first_failed <= found.largest + 64
    failed = [one for one in found.tries if not one.ran]
    assert {one.ended for one in failed} == {"stopped: would have left less than 1 GiB of the machine's memory"}
    assert all(one.seconds < 10 for one in failed)


def test_others_that_take_the_memory_are_not_the_trys_fault(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first try there is half a GiB left, and 1 GiB is the reserve: nothing is learnt from that."""
    tries: list[int] = []

    def host() -> Any:
        return SimpleNamespace(memory_bytes=32 * GIB, available_bytes=GIB // 2 if tries else 8 * GIB)

    monkeypatch.setattr(oom, "_host", host)
    monkeypatch.setattr(oom, "_PATIENCE_S", 0.3)
    judged = oom._judged
    monkeypatch.setattr(oom, "_judged", lambda *args, **more: (tries.append(1), judged(*args, **more))[1])
    found = fake("ran()")
    assert (found.largest, found.first_failed, len(found.tries)) == (64, None, 1)
    assert "ended early: other programs took the memory meanwhile" in found.note
    assert not found.interrupted
    # And in the middle of a try: its few MiB are not what is missing.
    tries.clear()
    monkeypatch.setattr(oom, "_judged", judged)
    monkeypatch.setattr(oom, "_child", lambda start=oom._child: (tries.append(1), start())[1])
    found = fake("time.sleep(60)")
    assert found.tries == ()
    assert "ended early" in found.note


def test_a_try_that_takes_more_than_its_limit_is_ended(fake: Any) -> None:
    """Where the system does not keep to the limit (macOS), the parent does: 300 MiB in bytes that are written."""
    found = fake("x = bytearray(b'x') * (size * 2**20); time.sleep(1 if size < 300 else 60); ran()", "batch", 300,
                 memory_limit=200 * MIB)  # fmt: skip
    stopped = [one for one in found.tries if one.ended.startswith("stopped: took")]
    assert stopped
    assert "more than the limit of 200 MiB" in stopped[0].ended
    assert found.largest is not None
    assert 100 < found.largest < 232


# -- nothing outlives it ----------------------------------------------------------------------------

SEARCH = """
import json, os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import test_profile_oom as t
from kvctl.measure import oom
oom._WORKER = ("-c", t.FAKE.replace("PREDICTED", "None") + sys.argv[2])
found = oom.until_oom(t.plan(), "ctx", t.heard(lambda one: print(one.size, flush=True)))
print(json.dumps([found.largest, found.interrupted, found.note]), flush=True)
"""


def _search(act: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SEARCH, os.path.abspath(__file__), act], stdout=subprocess.PIPE, text=True,
                            start_new_session=True)  # fmt: skip


def _grandchild(path: Path) -> psutil.Process:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if path.exists() and path.read_text().endswith("\n"):
            return psutil.Process(int(path.read_text()))
        time.sleep(0.02)
    raise AssertionError("no child was started")


def _gone(process: psutil.Process) -> bool:
    try:
        process.wait(10)
    except psutil.TimeoutExpired:
        return False
    return True


@posix
def test_ctrl_c_ends_the_try_and_keeps_what_is_known(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    parent = _search(
        f"if size <= 64: ran()\nelse:\n open({str(mark)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    )
    child = _grandchild(mark)
    parent.send_signal(signal.SIGINT)
    out = parent.communicate(timeout=30)[0].splitlines()
    assert _gone(child)
    assert out[0] == "64"
    largest, interrupted, note = json.loads(out[1])
    assert (largest, interrupted) == (64, True)
    assert "interrupted: larger ones may run" in note


@posix
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_killed_parent_takes_its_try_along(tmp_path: Path) -> None:
    """The real worker, which has not even got to importing torch or is anywhere after."""
    mark = tmp_path / "pid"
    code = f"""
import os, runpy, sys
open({str(mark)!r}, 'w').write(f'{{os.getpid()}}\\n')
from kvctl.measure import try_worker
import time
try_worker._told = lambda job: time.sleep(60)
try_worker.main()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", SEARCH.replace('t.FAKE.replace("PREDICTED", "None") + sys.argv[2]', "sys.argv[2]"),
         os.path.abspath(__file__), code], stdout=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    child = _grandchild(mark)
    time.sleep(0.5)
    assert Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip() == "1000"
    assert os.getsid(child.pid) == child.pid
    parent.kill()
    parent.wait()
    assert _gone(child)


# -- real models ------------------------------------------------------------------------------------


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("what", ["batch", "ctx"])
def test_a_real_model_until_memory_ends(what: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    limit = 900 * MIB
    asked = {"contexts": (128,)} if what == "batch" else {"prefill_chunk": 64, "batches": (1,)}
    found = until_oom(plan(**asked), what, heard(), limit)
    assert found.largest is not None
    assert found.first_failed is not None
    assert found.predicted is not None
    tokens = 130 if what == "batch" else 1
    cache = [size * tokens * ROW for size in (found.largest, found.first_failed)]
    small = found.tries[0]
    assert small.peak_bytes is not None
    # A process that holds the model, and room for the rest: what runs is within it, and no tenth of it is left unused.
    room = limit - small.peak_bytes
    assert cache[0] < room
    assert cache[1] > 0.8 * room
    assert found.predicted == pytest.approx(found.largest, rel=0.25)
    for one in found.tries:
        assert one.peak_bytes is not None
        assert one.peak_bytes <= limit * 1.03
        assert one.ran or one.ended.startswith("out of memory: ")


@pytest.mark.engine
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")
def test_weights_that_do_not_fit() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    big = plan({"hidden_size": 2048, "intermediate_size": 8192})  # 16 × (4 × 2048² + 3 × 2048 × 8192) × 4 bytes: 4 GiB
    found = until_oom(big, "ctx", heard(), 900 * MIB)
    assert (found.largest, found.first_failed, found.predicted) == (None, 64, None)
    assert "its weights do not fit into the memory of cpu" in found.tries[0].ended


@pytest.mark.engine
@pytest.mark.usefixtures("one_thread")
def test_a_model_that_cannot_be_loaded_is_an_error() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="does not know the type 'nonsense'"):
        until_oom(plan({"model_type": "nonsense"}), "ctx", heard())
