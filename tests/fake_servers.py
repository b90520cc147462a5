"""Stand-ins for llama-server, vllm and transformers as `kvctl serve-test` starts them: each is a program that serves a few words by HTTP.

`write` puts one into a folder, which goes on PATH; the word after `how` says what it does wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fake_engines import LLAMA_LOG, LLAMA_REFUSES, LLAMA_UNBOUND, VLLM_LOG, VLLM_REFUSES

# vLLM 0.32 on a CPU, SmolLM2-135M's shape with --max-model-len 322 --kv-cache-memory-bytes 201326592: what its log says in VLLM_LOG.
VLLM_PAGE = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",kv_cache_max_concurrency="22.666666666666668",kv_cache_size_tokens="7298",num_gpu_blocks="68",num_gpu_blocks_override="None"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
"""
LLAMA_PAGE = """\
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 0
"""

_PROGRAM = """#!{python}
import json, os, pathlib, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAME, HOW, HERE = {name!r}, {how!r}, pathlib.Path({here!r})
words = sys.argv[1:]
told = dict(zip(words, words[1:]))
model = told.get("-m") or words[1]

def note(pid):
    with (HERE / "pids").open("a") as file: file.write(f"{{pid}}\\n")

note(os.getpid())
(HERE / "words").write_text(json.dumps(words))
(HERE / "env").write_text(json.dumps(dict(os.environ)))
starts = len((HERE / "pids").read_text().split())
if HOW == "refuses": print({refuses!r}.format(model=model), end="", flush=True); sys.exit(1)
if HOW == "unbound" and starts < 3: print({unbound!r}, end="", flush=True); sys.exit(1)
if HOW == "stubborn":
    for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
if HOW in ("stubborn", "forks"):
    # One in its group, and one that has left it.
    for apart in (False, True): note(subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"], start_new_session=apart).pid)
print({log!r}.replace("{{model}}", model).replace("MODEL", model), end="", flush=True)
answered = 0

class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    def log_message(self, *args): pass
    def reply(self, value, status=200, kind="application/json"):
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status); self.send_header("Content-Type", kind); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        path = self.path
        if path == "/health": return self.reply({{"status": "ok"}}, 503 if HOW in ("never", "stubborn") else 200)
        if path == "/v1/models" and NAME == "llama-server":
            return self.reply({{"data": [{{"id": pathlib.Path(model).name, "owned_by": "llamacpp"}}]}})
        if path == "/v1/models" and NAME == "vllm":
            return self.reply({{"data": [{{"id": model, "owned_by": "vllm", "max_model_len": 322}}]}})
        if path == "/v1/models":  # and it closes the connection without saying so, as uvicorn does
            self.close_connection = True
            return self.reply({{"error": "offline"}}, 500)
        if path == "/openapi.json" and NAME == "transformers":
            return self.reply({{"paths": {{"/load_model": {{}}, "/reset": {{}}, "/v1/responses": {{}}}}}})
        if path == "/version": return self.reply({{"version": "0.32.0+cpu"}})
        if path == "/props" and NAME == "llama-server":
            return self.reply({{"default_generation_settings": {{"n_ctx": 512}}, "total_slots": 3, "build_info": "b0-unknown"}})
        if path == "/slots" and NAME == "llama-server": return self.reply([{{"id": n, "n_ctx": 512, "is_processing": False}} for n in range(3)])
        if path == "/metrics" and NAME != "transformers": return self.reply({page!r}, kind="text/plain")
        self.reply({{"error": "no such place"}}, 404)
    def do_POST(self):
        global answered
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"] if "messages" in body else body.get("prompt") or body.get("content") or ""
        count = len(text.split())
        if self.path == "/apply-template": return self.reply({{"prompt": text}})
        if self.path == "/tokenize": return self.reply({{"tokens": [1] * count, "count": count}})
        if not body.get("stream"): return self.reply({{"usage": {{"prompt_tokens": count, "completion_tokens": 1}}}})
        answered += 1
        (HERE / "served").write_text(str(answered))
        (HERE / "asked").write_text(json.dumps({{"body": body["model"], "headers": dict(self.headers)}}))
        if HOW == "dies" and answered > 5: print("GGML_ASSERT(n_tokens > 0) failed", flush=True); os._exit(1)
        if HOW == "slow": time.sleep(0.05)
        n = body["max_tokens"]
        events = [{{"choices": [{{"index": 0, "delta": {{"content": " a"}}, "finish_reason": "length" if i == n - 1 else None}}]}} for i in range(n)]
        events.append({{"choices": [], "usage": {{"prompt_tokens": count, "completion_tokens": n}}}})
        lines = [f"data: {{json.dumps(event)}}\\n\\n" for event in events] + ["data: [DONE]\\n\\n"]
        if HOW != "paced": return self.reply("".join(lines), kind="text/event-stream")
        self.send_response(200); self.send_header("Content-Type", "text/event-stream"); self.send_header("Content-Length", str(sum(map(len, lines)))); self.end_headers()
        for line in lines: time.sleep(0.005); self.wfile.write(line.encode())

class Server(ThreadingHTTPServer):
    request_queue_size = 128
    def handle_error(self, *args): pass  # a client that has gone is no word of the engine's

Server(("127.0.0.1", int(told["--port"])), Handler).serve_forever()
"""


def write(folder: Path, name: str, how: str = "") -> Path:
    """A program of this name in `folder`, which also keeps what it was asked."""
    folder.mkdir(exist_ok=True)
    log = {"llama-server": LLAMA_LOG, "vllm": VLLM_LOG}.get(name, "loading\n")
    # vLLM refuses where it would say how large the cache is.
    refuses = "\n".join([*VLLM_LOG.splitlines()[:-1], VLLM_REFUSES]) if name == "vllm" else LLAMA_REFUSES
    page = VLLM_PAGE if name == "vllm" else LLAMA_PAGE
    program = folder / name
    program.write_text(
        _PROGRAM.format(
            python=sys.executable, name=name, how=how, here=str(folder), log=log, page=page, refuses=refuses, unbound=LLAMA_UNBOUND
        )
    )  # fmt: skip
    program.chmod(0o755)
    return program
