"""OpenVINO GenAI behind the least of an OpenAI server: streamed completions from its continuous-batching pipeline.

    .venv-openvino_genai/bin/python openvino_server.py --model FILE.gguf --port 8000 [--batched-tokens 256]

One thread calls `step()` for ever; a connection has one of its own. Prompts are token ids or text. Only what
`legato bench` asks for: /v1/models, /v1/completions.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

sys.path.remove(str(Path(__file__).resolve().parent))  # a file there has the package's own name
import openvino as ov
import openvino_genai as genai


class Pipeline:
    """The pipeline, its stepping thread, and where the tokens of each request go."""

    def __init__(self, options: argparse.Namespace) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_batched_tokens = options.batched_tokens
        scheduler.max_num_seqs = options.max_num_seqs
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        properties = {"INFERENCE_NUM_THREADS": options.threads}
        self._pipeline = genai.ContinuousBatchingPipeline(str(options.model), scheduler, "CPU", properties)
        self.tokenizer = self._pipeline.get_tokenizer()
        self._live: dict[int, tuple[Any, queue.SimpleQueue[int | None]]] = {}
        self._new: queue.SimpleQueue[tuple[list[int], int, queue.SimpleQueue[int | None]]] = queue.SimpleQueue()
        self._requests = 0
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, prompt: list[int], new_tokens: int) -> queue.SimpleQueue[int | None]:
        """Where its tokens will come; None after the last."""
        tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._new.put((prompt, new_tokens, tokens))
        return tokens

    def _work(self) -> None:
        while True:
            self._admit(wait=not self._live)
            self._pipeline.step()
            for request_id, (handle, tokens) in list(self._live.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            tokens.put(token)
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    tokens.put(None)
                    del self._live[request_id]

    def _admit(self, *, wait: bool) -> None:
        while wait or not self._new.empty():
            prompt, new_tokens, tokens = self._new.get()
            wanted = genai.GenerationConfig()
            wanted.max_new_tokens = new_tokens
            wanted.ignore_eos = True
            wanted.do_sample = False
            self._requests += 1
            ids = ov.Tensor(np.array([prompt], dtype=np.int64))
            self._live[self._requests] = (self._pipeline.add_request(self._requests, ids, wanted), tokens)
            wait = False


class Handler(BaseHTTPRequestHandler):
    """Two paths."""

    protocol_version = "HTTP/1.1"
    pipeline: Pipeline

    def do_GET(self) -> None:
        self._document({"object": "list", "data": [{"id": "smollm2", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            self._document({"error": {"message": "only /v1/completions"}}, 404)
            return
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else self.pipeline.tokenizer.encode(prompt).input_ids.data[0].tolist()
        tokens = self.pipeline.submit(ids, body.get("max_tokens", 16))
        if body.get("stream"):
            self._stream(tokens, len(ids))
            return
        count = sum(1 for _ in iter(tokens.get, None))
        usage = {"prompt_tokens": len(ids), "completion_tokens": count, "total_tokens": len(ids) + count}
        self._document({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage})

    def _stream(self, tokens: queue.SimpleQueue[int | None], prompt_tokens: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        count = 0
        try:
            for token in iter(tokens.get, None):
                count += 1
                text = self.pipeline.tokenizer.decode([token]) or " "
                self._event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
            self._event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
            self._event({"choices": [], "usage": usage})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _document(self, value: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--batched-tokens", type=int, default=256)
    options = parser.parse_args()
    Handler.pipeline = Pipeline(options)
    ThreadingHTTPServer.request_queue_size = 256
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
