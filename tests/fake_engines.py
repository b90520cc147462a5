"""Stand-ins for llama-server and for a Python with vLLM: they print what the real ones print, and misbehave as told.

`llama_server` and `vllm_python` write a program; the word after `how` says what it does wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

# llama-server 0.6.0-dev with SmolLM2-135M-Instruct at -c 966 -np 3 -lv 4, shortened; {model} is the file.
LLAMA_LOG = """\
0.00.002.081 I cmn  common_param: common_params_print_info: build 0 (unknown) with GNU 12.2.0 for Linux x86_64
0.00.002.464 W srv  llama_server: security: no API key is set and CORS allows all origins
0.00.091.988 I llama_model_loader: loaded meta data with 33 key-value pairs and 272 tensors from {model} (version GGUF V3 (latest))
0.00.092.017 I llama_model_loader: - kv   2:                               general.name str              = Smollm2 135M 8k Lc100K Mix1 Ep2
0.00.142.570 I print_info: n_ctx_train           = 8192
0.00.150.333 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB
0.00.151.532 W llama_context: n_ctx is not divisible by n_seq_max - rounding down to 1536
0.00.151.534 I llama_context: n_seq_max             = 3
0.00.151.534 I llama_context: n_ctx                 = 1536
0.00.151.535 I llama_context: n_ctx_seq             = 512
0.00.151.535 I llama_context: n_batch               = 966
0.00.151.535 I llama_context: n_ubatch              = 512
0.00.151.536 I llama_context: flash_attn            = auto
0.00.151.537 I llama_context: kv_unified            = false
0.00.151.562 I llama_context:        CPU  output buffer size =     0.56 MiB
0.00.151.651 I llama_kv_cache:        CPU KV buffer size =    33.75 MiB
0.00.165.270 I llama_kv_cache: size =   33.75 MiB (   512 cells,  30 layers,  3/3 seqs), K (f16):   16.88 MiB, V (f16):   16.88 MiB
0.00.167.637 I sched_reserve:        CPU compute buffer size =    15.17 MiB
0.00.192.368 I srv    load_model: initializing, n_slots = 3, n_ctx_slot = 512, kv_unified = 'false'
"""
# The same, where keys and values were to be apart: q8_0 values without flash attention.
LLAMA_REFUSES = """\
0.00.082.642 E llama_init_from_model: quantized V cache requires flash_attn to be enabled
0.00.093.463 E common_fit_params: encountered an error while trying to fit params to free device memory: failed to create llama_context from model
0.00.172.497 E llama_init_from_model: quantized V cache requires flash_attn to be enabled
0.00.172.527 E cmn  common_init_: failed to create context with model '{model}'
0.00.172.582 E srv    load_model: failed to create_context with model '{model}'
0.00.173.072 E srv  llama_server: exiting due to model loading error
"""
LLAMA_OUT_OF_MEMORY = """\
0.01.903.601 E ggml_aligned_malloc: insufficient memory (attempted to allocate 878906.25 MB)
0.01.903.690 E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 921600000000
0.02.046.271 E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache
0.02.046.363 E cmn  common_init_: failed to create context with model '{model}'
0.02.046.827 E srv  llama_server: exiting due to model loading error
"""
LLAMA_UNBOUND = """\
0.00.002.468 E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18998
0.00.002.533 E srv  llama_server: exiting due to HTTP server error
"""

_LLAMA = """#!{python}
import json, os, pathlib, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOW, HERE = {how!r}, pathlib.Path({here!r})
words = sys.argv[1:]
told = {{name: value for name, value in zip(words, words[1:])}}
model = told["-m"]
(HERE / "pids").open("a").write(f"{{os.getpid()}}\\n")
(HERE / "words").write_text(json.dumps(words))
(HERE / "env").write_text(json.dumps(dict(os.environ)))

def end(text, status=1):
    print(text.format(model=model), end="", flush=True)
    sys.exit(status)

if HOW == "refuses": end({refuses!r})
if HOW == "memory": end({log!r} + {memory!r})
if HOW == "unbound" and len((HERE / "pids").read_text().split()) < 3: end({unbound!r})
if HOW == "always unbound": end({unbound!r})
if HOW == "silent": sys.exit(3)
if HOW == "killed": print("loading", flush=True); os.kill(os.getpid(), signal.SIGKILL)
if HOW == "bytes": sys.stdout.buffer.write(bytes(range(256)) * 50); sys.exit(1)
if HOW == "hangs": print("loading tensors", flush=True); time.sleep(600)
if HOW == "floods":
    while True: sys.stdout.write("x" * 65536 + "\\n")
if HOW == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0: (HERE / "pids").open("a").write(f"{{os.getpid()}}\\n"); time.sleep(600)
print({log!r}.format(model=model), end="", flush=True)

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def reply(self, value, status=200):
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status); self.send_header("Content-Length", str(len(text))); self.end_headers(); self.wfile.write(text)
    def do_GET(self):
        if self.path == "/health": return self.reply({{"status": "ok"}})
        if self.path == "/props": return self.reply({{"model_path": "/other.gguf" if HOW == "other" else model, "total_slots": 3, "build_info": "b0-unknown"}})
        self.reply(b"<html>" if HOW == "html" else {{"data": [{{"meta": {{"n_vocab": 49152}}}}]}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize": return self.reply({{"tokens": [7, 8, 9]}})
        (HERE / "requests").open("a").write(json.dumps(body) + "\\n")
        less = HOW == "fewer" and body["n_predict"] > 1
        count, prompt, slot = body["n_predict"], len(body["prompt"]), body["id_slot"]
        if HOW == "too long" and prompt > 100:
            return self.reply({{"error": {{"code": 400, "message": "request (300 tokens) exceeds the available context size (256 tokens), try increasing it"}}}}, 400)
        self.send_response(200); self.end_headers()
        def event(n, ms, **more):
            timings = {{"cache_n": 0, "prompt_n": prompt - (HOW == "shorter"), "prompt_ms": prompt * 2.0, "predicted_n": n, "predicted_ms": ms}}
            self.wfile.write(b"data: " + json.dumps({{"content": "a", "timings": timings, **more}}).encode() + b"\\n\\n"); self.wfile.flush()
        if HOW == "nonsense": event(10**12, 1000.0)
        if HOW == "endless" and count > 1: event(2, float("inf"))
        if HOW == "odd": self.wfile.write(b"error: 5\\n\\n"); return
        if HOW == "garbage": self.wfile.write(b"data: {{]\\n\\n"); return
        if HOW == "breaks": self.wfile.write(b'data: {{"error": {{"code": 500, "message": "Context size has been exceeded."}}}}\\n\\n'); return
        if HOW == "dies" and count > 1: print("GGML_ASSERT(n_tokens > 0) failed", flush=True); os._exit(1)
        if HOW == "stalls": time.sleep(600)
        if HOW == "lasts" and prompt > 64: print("waits", flush=True); (HERE / "waits").touch(); time.sleep(600)
        # A sequence that is queued begins when the others have ended.
        if HOW == "queues" and slot == 2: time.sleep(0.3)
        # The first token at once, then a step of 2 ms, of 3 ms … on this clock; every fourth makes no text of its own.
        ms = 0.0
        for n in range(1, count + 1 - less):
            if n > 1: ms += n; time.sleep(n / 1000)
            if n % 4: event(n, ms)
        event(count - less, ms, stop=True)

class Server(ThreadingHTTPServer):
    def handle_error(self, *args): pass  # a client that has gone is no word of the engine's

Server(("127.0.0.1", int(told["--port"])), Handler).serve_forever()
"""


def llama_server(folder: Path, how: str = "") -> Path:
    """A llama-server in `folder`, which also keeps what it was asked."""
    folder.mkdir(exist_ok=True)
    program = folder / "llama-server"
    program.write_text(
        _LLAMA.format(
            python=sys.executable, how=how, here=str(folder), log=LLAMA_LOG, refuses=LLAMA_REFUSES,
            memory=LLAMA_OUT_OF_MEMORY, unbound=LLAMA_UNBOUND,
        )
    )  # fmt: skip
    program.chmod(0o755)
    return program


# vLLM 0.32 on a CPU, SmolLM2-135M's shape with --kv-cache-memory-bytes 201326592, shortened.
VLLM_LOG = """\
(MainProcess pid=17130) INFO 11-30 02:32:52 [api_utils.py:286] non-default args: {'skip_tokenizer_init': True, 'load_format': 'dummy', 'max_model_len': 322, 'kv_cache_memory_bytes': 201326592, 'disable_log_stats': True, 'enforce_eager': True, 'model': 'MODEL'}
(MainProcess pid=17130) INFO 11-30 02:32:52 [scheduler.py:307] Chunked prefill is enabled with max_num_batched_tokens=4096.
(MainProcess pid=17130) INFO 11-30 02:32:53 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='MODEL', speculative_config=None, tokenizer='MODEL', skip_tokenizer_init=True, dtype=torch.bfloat16, max_seq_len=322, load_format=dummy, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, kv_cache_dtype=auto, device_config=cpu, seed=0, enable_prefix_caching=True, enable_chunked_prefill=True
(MainProcess pid=17130) INFO 11-30 02:32:56 [cpu_worker.py:260] Explicitly set (0.19/23.54) GiB for KV cache on node 0.
(MainProcess pid=17130) INFO 11-30 02:32:56 [kv_cache_utils.py:2327] CPU KV cache size: 7,298 tokens, Maximum concurrency for 322 tokens per request: 22.67x
"""
VLLM_REFUSES = """\
ValueError: To serve at least one request with the models's max seq len (8192), (0.18 GiB KV cache is needed, which is larger than the available KV cache memory (0.09 GiB). Based on the available memory, the estimated maximum model length is 4352. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
"""

_VLLM = """#!{python}
import json, os, pathlib, sys, time

HOW, HERE = {how!r}, pathlib.Path({here!r})
if sys.argv[1] == "-c":
    if HOW == "endless":
        while True: print("yes yes yes")
    print("" if HOW == "none" else "vLLM is here")
    sys.exit()
ask = json.loads(pathlib.Path(sys.argv[2]).read_text())
out = open(sys.argv[3], "a")
(HERE / "pids").open("a").write(f"{{os.getpid()}}\\n")
(HERE / "words").write_text(json.dumps(ask["words"]))

def say(**answer): out.write(json.dumps(answer) + "\\n"); out.flush()

print({log!r}.replace("MODEL", ask["words"][0]), end="", flush=True)
if HOW == "refuses": print({refuses!r}, flush=True); say(kind="error", error="ValueError: To serve at least one request"); sys.exit(1)
if HOW == "illegal": import signal; os.kill(os.getpid(), signal.SIGILL)
if HOW == "garbage": out.write("]\\n"); out.flush(); time.sleep(600)
say(kind="ready", version="0.32.0", blocks=68, block_size=128, cache_dtype="auto", prefix_caching=True, batch_tokens=4096, sequences=128, length=322, vocabulary=49152)
for point in ask["points"]:
    for repeat in range(ask["repeats"]):
        say(kind="state", text="runs")
        # A first token after 1 ms a prompt token of every sequence up to this, then steps of 10 ms; the batch is one step.
        firsts = [point["context"] * (index + 1) / 1000 for index in range(point["batch"])]
        last = firsts[-1]
        events = [[[1, first]] + [[2 + step, last + 0.01 * (step + 1)] for step in range(point["steps"] - 1)] for first in firsts]
        say(kind="pass", context=point["context"], batch=point["batch"], repeat=repeat, sequences=events, cached=int(HOW == "cached"))
    if HOW == "dies": print("RuntimeError: Engine core died", flush=True); sys.exit(1)
    if HOW == "point": say(kind="point_error", context=point["context"], batch=point["batch"], error="ValueError: too long")
    if HOW == "lasts": (HERE / "waits").touch(); time.sleep(600)
say(kind="done")
"""


def vllm_python(folder: Path, how: str = "") -> Path:
    """A Python that has vLLM, in `folder`."""
    folder.mkdir(exist_ok=True)
    program = folder / "python"
    program.write_text(
        _VLLM.format(python=sys.executable, how=how, here=str(folder), log=VLLM_LOG, refuses=VLLM_REFUSES)
    )
    program.chmod(0o755)
    return program


# A vllm package whose engine takes a pass for every prompt and then a token of each in every step.
VLLM_PACKAGE = {
    "vllm/__init__.py": """
import types
from vllm.engine.arg_utils import EngineArgs
__version__ = "9.9"
class SamplingParams(types.SimpleNamespace): pass
class Engine:
    def __init__(self, **told):
        print("LLM", sorted(told.items()), flush=True)
        spaces = types.SimpleNamespace
        self.vllm_config = spaces(
            cache_config=spaces(num_gpu_blocks=68, block_size=128, cache_dtype="auto", enable_prefix_caching=True),
            scheduler_config=spaces(max_num_batched_tokens=4096, max_num_seqs=128),
            model_config=spaces(max_model_len=told["max_model_len"], get_vocab_size=lambda: 100))
        self.waiting, self.running, self.resets, self.seen = [], [], 0, set()
    def reset_prefix_cache(self): self.resets += 1; self.seen = set()
    def add_request(self, name, prompt, params):
        if len(prompt["prompt_token_ids"]) > 500: raise ValueError("Prompt length\\nis longer than the maximum")
        assert params.ignore_eos and not params.detokenize
        self.waiting.append([name + "-0", prompt["prompt_token_ids"], params.max_tokens, 0]); return name + "-0"
    def has_unfinished_requests(self): return bool(self.waiting or self.running)
    def step(self):
        if self.waiting: self.running.append(self.waiting.pop(0)); todo = self.running
        else: todo = self.running
        out = []
        for one in todo:
            one[3] += 1
            out.append(types.SimpleNamespace(request_id=one[0], outputs=[types.SimpleNamespace(token_ids=[5] * one[3])],
                                             finished=one[3] == one[2], num_cached_tokens=0))
        self.running = [one for one in self.running if one[3] < one[2]]
        return out
class LLM:
    def __init__(self, **told): self.llm_engine = Engine(**told)
""",
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser",
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": """
import dataclasses
@dataclasses.dataclass
class EngineArgs:
    model: str = "Qwen/Qwen3-0.6B"
    max_model_len: int | None = None
    skip_tokenizer_init: bool = False
    enforce_eager: bool = False
    def __post_init__(self): raise AssertionError("a default model would be fetched")
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model", default="Qwen/Qwen3-0.6B"); parser.add_argument("--max-model-len", type=int)
        parser.add_argument("--skip-tokenizer-init", action="store_true"); parser.add_argument("--enforce-eager", action="store_true")
        return parser
""",
}
