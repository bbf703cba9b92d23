"""OpenVINO GenAI behind the least of an OpenAI server: greedy completions from its continuous-batching pipeline.

    .venv-openvino_genai/bin/python openvino_server.py --model FILE.gguf --port 8000 [--batched-tokens 256]

One thread steps the pipeline, sends what the step brought, and takes in what has arrived: `step()` keeps Python's lock
while it computes, and other threads would deliver its tokens late. A request whose client leaves is cancelled.
Answers what `legato bench` asks: /health, /v1/models, /v1/completions, /v1/chat/completions.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.remove(str(Path(__file__).resolve().parent))  # a file there has the package's own name
import openvino as ov
import openvino_genai as genai

MODELS = {"object": "list", "data": [{"id": "openvino", "object": "model"}]}


class Exchange:
    """One connection with one request. `handle`: of the pipeline, from the request's arrival to its last token."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        self.handle: Any = None
        self.is_stream = self.is_chat = self.tells_usage = False
        self.prompt_tokens = 0
        self.text: list[str] = []

    def begin_stream(self) -> None:
        """The head of an answer that ends with the connection."""
        self._send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")

    def add(self, text: str) -> None:
        """One more token."""
        self.text.append(text)
        if self.is_stream:
            self._event({"choices": [self._choice(text, None)]})

    def finish(self, reason: str) -> None:
        """What follows the last token."""
        made = len(self.text)
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
        }
        if not self.is_stream:
            self.document({"choices": [self._choice("".join(self.text), reason)], "usage": usage})
            return
        self._event({"choices": [self._choice("", reason)]})
        if self.tells_usage:
            self._event({"choices": [], "usage": usage})
        self._send(b"data: [DONE]\n\n")

    def document(self, value: dict[str, Any], status: str = "200 OK") -> None:
        """An answer in one piece."""
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        self._send(f"{head}\r\nconnection: close\r\n\r\n".encode() + data)

    def _choice(self, text: str, reason: str | None) -> dict[str, Any]:
        content = {"role": "assistant", "content": text}
        said = {"delta" if self.is_stream else "message": content} if self.is_chat else {"text": text}
        return {"index": 0, "finish_reason": reason, **said}

    def _event(self, value: dict[str, Any]) -> None:
        self._send(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _send(self, data: bytes) -> None:
        self.connection.sendall(data)


class Server:
    """The pipeline and its clients."""

    def __init__(self, options: argparse.Namespace) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = options.cache_gib
        scheduler.max_num_batched_tokens = options.batched_tokens
        scheduler.max_num_seqs = options.max_num_seqs
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        properties = {"INFERENCE_NUM_THREADS": options.threads}
        self._pipeline = genai.ContinuousBatchingPipeline(str(options.model), scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        # A token's text is looked up: the tokenizer's own decode costs half a millisecond, once for every stream.
        self._pieces = {token: piece.decode("utf-8", "replace") for piece, token in self._tokenizer.get_vocab().items()}
        self._requests = 0
        self._running: list[Exchange] = []
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", options.port), backlog=512)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """For ever."""
        while True:
            is_busy = self._pipeline.has_non_finished_requests()
            for key, _ in self._selector.select(0 if is_busy else None):
                if key.data is None:
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ, Exchange(connection))
                else:
                    self._receive(key.data)
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                for exchange in list(self._running):
                    self._deliver(exchange)

    def _receive(self, exchange: Exchange) -> None:
        try:
            data = exchange.connection.recv(1 << 20)
            if not data:
                return self._close(exchange)
            exchange.received += data
            head, blank, body = exchange.received.partition(b"\r\n\r\n")
            if exchange.handle is None and blank and len(body) >= content_length(head):
                self._answer(exchange, head.split(b" ", 2)[1].decode(), body)
        except OSError:
            self._close(exchange)

    def _answer(self, exchange: Exchange, path: str, body: bytes) -> None:
        if path in ("/health", "/v1/models"):
            exchange.document(MODELS)
            return self._close(exchange)
        try:
            self._submit(exchange, path, json.loads(body))
        except (LookupError, TypeError, ValueError) as error:
            exchange.document({"error": {"message": f"{path}: {type(error).__name__}: {error}"}}, "400 Bad Request")
            self._close(exchange)

    def _submit(self, exchange: Exchange, path: str, asked: dict[str, Any]) -> None:
        exchange.is_chat = path.endswith("/chat/completions")
        prompt = asked["messages" if exchange.is_chat else "prompt"]
        if exchange.is_chat:
            prompt = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        ids = self._tokenizer.encode(prompt).input_ids.data if isinstance(prompt, str) else np.array([prompt], np.int64)
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens = int(asked.get("max_tokens", 16))
        wanted.ignore_eos = bool(asked.get("ignore_eos"))
        wanted.eos_token_id = self._tokenizer.get_eos_token_id()
        wanted.do_sample = False
        exchange.prompt_tokens = ids.shape[1]
        exchange.is_stream = bool(asked.get("stream"))
        exchange.tells_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        self._requests += 1
        exchange.handle = self._pipeline.add_request(self._requests, ov.Tensor(np.array(ids)), wanted)
        self._running.append(exchange)
        if exchange.is_stream:
            exchange.begin_stream()

    def _deliver(self, exchange: Exchange) -> None:
        reason = None
        try:
            while exchange.handle.can_read():
                for output in exchange.handle.read().values():
                    for token in output.generated_ids:
                        exchange.add(self._pieces.get(token) or " ")
                    reason = output.finish_reason
            if exchange.handle.get_status() != genai.GenerationStatus.RUNNING:
                exchange.finish("stop" if reason == genai.GenerationFinishReason.STOP else "length")
                self._close(exchange)
        except OSError:
            self._close(exchange)

    def _close(self, exchange: Exchange) -> None:
        if exchange.handle is not None:
            exchange.handle.cancel()
            self._running.remove(exchange)
        self._selector.unregister(exchange.connection)
        exchange.connection.close()


def content_length(head: bytes) -> int:
    """As the head of a request tells it."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batched-tokens", type=int, default=256, help="tokens of a step, decodes included")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--cache-gib", type=int, default=2, help="memory for keys and values")
    Server(parser.parse_args()).serve()


if __name__ == "__main__":
    main()
