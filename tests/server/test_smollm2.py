"""`legato serve` with a real model, spoken to by OpenAI's own client."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from legato import LLM, SamplingParams
from legato.explain.attribute import explain
from legato.explain.lanes import lanes_of
from legato.explain.read import read_trace

QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
PROMPT = "The three primary colours are"


class Server:
    """A running `legato serve`."""

    def __init__(self, model: Path, trace: Path) -> None:
        self.trace = trace
        command = [sys.executable, "-m", "legato.cli.main", "serve", str(model), "--port", "0", "--max-num-seqs", "16"]
        command += ["--served-model-name", "smol", "--kv-tokens", "8192", "--max-num-batched-tokens", "256"]
        command += ["--trace", str(trace), "--trace-size", "16MiB"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.banner = ""
        while "Ctrl-C" not in self.banner:
            line = self.process.stdout.readline()
            if not line:
                self.process.stdout.close()
                pytest.fail(f"the server ended with {self.process.wait()}: {self.banner}")
            self.banner += line
        found = re.search(r"http://[\d.]+:\d+", self.banner)
        assert found is not None
        self.address = found[0]
        self.client = openai.OpenAI(base_url=self.address + "/v1", api_key="none", max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.address + "/metrics", timeout=10) as response:
            page = response.read().decode()
        return float(next(line for line in page.splitlines() if line.startswith(name + "{")).rsplit(" ", 1)[1])

    def stop(self) -> int:
        self.client.close()
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(timeout=20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(smollm2_path, tmp_path_factory.mktemp("trace") / "steps.jsonl")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client


def test_the_banner_says_how_to_begin(server: Server) -> None:
    for words in (
        "256 tokens",
        "16 sequences",
        "KV pool 8,192 tokens",
        "weights",
        "steps.jsonl, 16 MiB",
        f"curl -N {server.address}",
    ):
        assert words in server.banner
    curl = next(line for line in server.banner.splitlines() if line.startswith("curl"))
    done = subprocess.run(
        ["bash", "-c", curl.replace("curl", "curl -sS", 1)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("data: {")
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_a_question_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smol", messages=QUESTION, temperature=0, max_tokens=32)
    assert all(word in (answer.choices[0].message.content or "") for word in ("sky", "blue", "scatter"))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_and_ends_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smol", messages=QUESTION, temperature=0, max_tokens=32)
    chunks = list(
        client.chat.completions.create(
            model="smol",
            messages=QUESTION,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert sum(bool(c.choices) for c in chunks) > 5


def test_a_seed_makes_a_sampled_text_repeatable_and_n_texts_differ(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model="smol", prompt=PROMPT, temperature=1.0, seed=seed, n=3, max_tokens=16, top_p=0.95
        )
        return [choice.text for choice in answer.choices]

    first = texts(7)
    assert first == texts(7)
    assert len(set(first)) == 3
    assert texts(8)[:2] == first[1:]  # sequence i uses seed + i


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    free = client.completions.create(model="smol", prompt=PROMPT, temperature=0, max_tokens=24).choices[0].text
    middle = free[len(free) // 2 :][:4]
    cut = client.completions.create(model="smol", prompt=PROMPT, temperature=0, max_tokens=24, stop=[middle]).choices[0]
    assert cut.text == free[: free.index(middle)]
    assert cut.finish_reason == "stop"


def test_logprobs_are_those_of_the_chosen_and_the_likeliest(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smol", messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert (entry.top_logprobs[0].token, values[0]) == (entry.token, entry.logprob)
        assert bytes(entry.bytes or []).decode() == entry.token
    columns = client.completions.create(model="smol", prompt=PROMPT, temperature=0, max_tokens=4, logprobs=2).choices[0]
    assert columns.logprobs is not None
    assert "".join(columns.logprobs.tokens or []) == columns.text


def test_prompts_of_tokens_and_several_at_once(server: Server, client: openai.OpenAI, llm: LLM) -> None:
    ids = list(llm.text.encode(PROMPT))
    several = client.completions.create(model="smol", prompt=[ids, ids[:3]], temperature=0, max_tokens=12)
    alone = client.completions.create(model="smol", prompt=PROMPT, temperature=0, max_tokens=12)
    assert several.choices[0].text == alone.choices[0].text


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(str(smollm2_path), kv_tokens=4096, max_num_seqs=8)


def test_offline_and_served_texts_are_the_same(client: openai.OpenAI, llm: LLM) -> None:
    """Other budgets, other company, another process: the same bytes."""
    prompts = [PROMPT, "Water boils at", "def fibonacci(n):", "Once upon a time " * 40]
    offline = llm.generate(prompts, SamplingParams(max_tokens=16), progress=False)
    served = client.completions.create(model="smol", prompt=prompts, temperature=0, max_tokens=16)
    assert [choice.text for choice in served.choices] == [completion.text for completion in offline]


def test_offline_and_served_log_probabilities_of_a_prompt_are_the_same(client: openai.OpenAI, llm: LLM) -> None:
    prompt = "Water boils at a temperature of " * 20
    params = SamplingParams(max_tokens=2, n=2, prompt_logprobs=1)
    first, second = llm.generate(prompt, params, progress=False)
    assert first.prompt_logprobs is second.prompt_logprobs
    assert len(first.prompt_logprobs) == len(first.prompt) and first.prompt_logprobs[0] is None
    body = {"model": "smol", "prompt": prompt, "temperature": 0, "max_tokens": 2}
    served = client.completions.create(**body, extra_body={"prompt_logprobs": 1}).choices[0].model_extra
    assert served is not None
    echoed = client.completions.create(**body, echo=True, logprobs=1).choices[0]
    assert echoed.text == prompt + first.text and echoed.logprobs is not None
    for position, entry in enumerate(first.prompt_logprobs):
        if entry is not None:
            found = served["prompt_logprobs"][position][str(first.prompt[position])]
            assert (found["logprob"], found["rank"]) == (entry.chosen, entry.rank)
            assert echoed.logprobs.token_logprobs[position] == entry.chosen
    (late,) = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=99))
    assert late.prompt_logprobs == [None] * 99 + first.prompt_logprobs[99:]
    assert late.cached_tokens == 96
    (short,) = llm.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert short.prompt_logprobs == [None]


def test_a_client_that_leaves_frees_its_slot(server: Server, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="smol", prompt=PROMPT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.metric("vllm:num_requests_running") == 1
    stream.close()
    deadline = time.monotonic() + 5
    while server.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.metric("legato_kv_free_blocks") == server.metric("legato_kv_blocks")


def test_a_client_that_leaves_during_its_prompt_goes_on_where_it_stopped(
    server: Server, client: openai.OpenAI, llm: LLM
) -> None:
    prompt = [(7 * position * position + position) % 40_000 + 300 for position in range(4000)]
    before = server.metric("legato_chunk_tokens_total")
    body = json.dumps({"model": "smol", "prompt": prompt, "max_tokens": 1, "temperature": 0})
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as leaving:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        leaving.sendall((head + body).encode())
        while server.metric("legato_chunk_tokens_total") == before:
            time.sleep(0.01)
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.02)
    computed = server.metric("legato_chunk_tokens_total") - before
    assert 0 < computed < 4000, "it left in the middle of its prompt"
    again = client.completions.create(model="smol", prompt=prompt, max_tokens=8, temperature=0, timeout=180)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == computed // 32 * 32
    (alone,) = llm.generate([prompt], SamplingParams(max_tokens=8), progress=False)
    assert again.choices[0].text == alone.text


def test_what_cannot_be_served_is_refused_with_a_name_or_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.completions.create(model="smol", prompt=[1] * 9000)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="smol", prompt=[49152])
    assert refused.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="smol", messages=QUESTION, extra_body={"colour": 1})
    assert refused.value.param == "colour"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="x")


def test_generate_prints_the_text_of_the_same_model(smollm2_path: Path, llm: LLM) -> None:
    command = [sys.executable, "-m", "legato.cli.main", "generate", str(smollm2_path), PROMPT, "--max-tokens", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (completion,) = llm.generate(PROMPT, SamplingParams(max_tokens=12), progress=False)
    assert done.stdout == completion.text + "\n"
    assert done.stderr == ""


def test_every_gap_of_a_served_text_is_explained_while_the_server_goes_on(
    server: Server, client: openai.OpenAI, llm: LLM
) -> None:
    long = "Once upon a time there was a king. " * 60
    with client.completions.create(model="smol", prompt=PROMPT, max_tokens=40, temperature=0, stream=True) as stream:
        first = next(iter(stream))
        client.completions.create(model="smol", prompt=long, max_tokens=2, temperature=0)
        assert first.choices and sum(bool(chunk.choices) for chunk in stream) >= 30
    trace = read_trace(server.trace)
    found = explain(trace, 0.001)
    assert found.deviation < 0.02
    read = max(trace.requests)
    beside = [gap for gap in found.late if read in gap.parts.chunks]
    assert len(beside) >= 2, "the stream went on while the long prompt was read"
    (lane,) = (lane for lane in lanes_of(trace) if lane.request_id == read)
    assert sum(rows for _, _, rows in lane.chunks) == len(llm.text.encode(long))
