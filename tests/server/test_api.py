"""The endpoints over ASGI, before an engine whose answers one can compute by hand: it repeats the prompt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from legato.engine.service import EngineService

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
ANSWER = "user:hi|" * 50


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def sse(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event[6:]) for event in events[:-2]]


def streamed_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def usage(prompt: int, generated: int, cached: int = 0) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


async def test_chat_answers_with_the_template_applied(client: httpx.AsyncClient) -> None:
    answer = await post(client, CHAT, model="fake", **HELLO, max_tokens=12)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER[:12], "refusal": None}
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == usage(8, 12)


async def test_content_may_come_in_text_parts_and_developer_means_system(client: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    answer = await post(client, CHAT, messages=messages, max_completion_tokens=24)
    assert answer["choices"][0]["message"]["content"] == "system:be brief|user:ab|"


async def test_chat_without_max_tokens_goes_to_the_end_of_the_context(client: httpx.AsyncClient) -> None:
    answer = await post(client, CHAT, **HELLO)
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_stream_says_the_same_as_a_document(client: httpx.AsyncClient) -> None:
    chunks = await sse(client, CHAT, **HELLO, max_tokens=12, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed_text(chunks) == ANSWER[:12]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1] if c["choices"][0]["finish_reason"]] == ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage(8, 12)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_without_include_usage_no_chunk_mentions_it(client: httpx.AsyncClient) -> None:
    chunks = await sse(client, TEXT, prompt="abc", max_tokens=4)
    assert all("usage" not in chunk for chunk in chunks)
    assert streamed_text(chunks) == "abca"


async def test_the_end_token_ends_the_text_and_is_no_part_of_it(client: httpx.AsyncClient) -> None:
    answer = await post(client, TEXT, prompt=[104, 105, 0], max_tokens=9)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "stop")
    assert answer["usage"]["completion_tokens"] == 3
    answer = await post(client, TEXT, prompt=[104, 105, 0], max_tokens=9, ignore_eos=True)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("hihihi", "length")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abca"]),
        (["abc", "xy"], ["abca", "xyxy"]),
        ([97, 98], ["abab"]),
        ([[97], [98, 99]], ["aaaa", "bcbc"]),
    ],
)
async def test_a_prompt_is_text_or_tokens_one_or_several(client: httpx.AsyncClient, prompt: Any, texts: Any) -> None:
    answer = await post(client, TEXT, prompt=prompt, max_tokens=4)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


async def test_n_gives_so_many_choices_streamed_or_not(client: httpx.AsyncClient) -> None:
    answer = await post(client, TEXT, prompt=["ab", "c"], n=2, max_tokens=3)
    assert [choice["text"] for choice in answer["choices"]] == ["aba", "aba", "ccc", "ccc"]
    assert answer["usage"] == usage(3, 12)
    chunks = await sse(client, CHAT, **HELLO, n=6, max_tokens=5)
    assert [streamed_text(chunks, i) for i in range(6)] == [ANSWER[:5]] * 6
    finished = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(finished) == list(range(6))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_text_before_it(client: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "hello world ", "max_tokens": 40, "stop": ["zz", "o w"]}
    if stream:
        chunks = await sse(client, TEXT, **body)
        assert streamed_text(chunks) == "hell"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        answer = await post(client, TEXT, **body)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("hell", "stop")
        assert answer["usage"]["completion_tokens"] == 7


async def test_a_stop_token_id_ends_the_text(client: httpx.AsyncClient) -> None:
    answer = await post(client, TEXT, prompt="hello", max_tokens=40, stop_token_ids=[ord("o")])
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("hell", "stop")
    answer = await post(client, TEXT, prompt="hello", max_tokens=40, stop_token_ids=[ord("o")], min_tokens=6)
    assert answer["choices"][0]["text"] == "hellohell"


async def test_characters_of_several_tokens_are_never_cut(client: httpx.AsyncClient) -> None:
    chunks = await sse(client, TEXT, prompt="é🎻", max_tokens=12)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == "é🎻é🎻"
    assert not any("\ufffd" in text for text in texts)
    chunks = await sse(client, TEXT, prompt="é🎻", max_tokens=11)
    assert streamed_text(chunks) == "é🎻é\ufffd"


async def test_chat_logprobs_come_with_bytes_and_alternatives(client: httpx.AsyncClient) -> None:
    answer = await post(client, CHAT, **HELLO, max_tokens=2, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "u",
        "logprob": -0.25,
        "bytes": [117],
        "top_logprobs": [
            {"token": "u", "logprob": -0.25, "bytes": [117]},
            {"token": "v", "logprob": -1.25, "bytes": [118]},
        ],
    }
    chunks = await sse(client, CHAT, **HELLO, max_tokens=5, logprobs=True, top_logprobs=2)
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in streamed] == list("user:")


async def test_completion_logprobs_come_in_columns(client: httpx.AsyncClient) -> None:
    answer = await post(client, TEXT, prompt="ab", max_tokens=3, logprobs=1)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "a"],
        "token_logprobs": [-0.25] * 3,
        "top_logprobs": [{"a": -0.25}, {"b": -0.25}, {"a": -0.25}],
        "text_offset": [0, 1, 2],
    }
    chunks = await sse(client, TEXT, prompt="ab", max_tokens=3, logprobs=0)
    columns = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [offset for column in columns for offset in column["text_offset"]] == [0, 1, 2]


async def test_usage_tells_how_much_of_the_prompt_was_cached(client: httpx.AsyncClient) -> None:
    prompt = "cached " * 7
    body = {"prompt": prompt, "max_tokens": 2}
    assert (await post(client, TEXT, **body))["usage"] == usage(49, 2)
    assert (await post(client, TEXT, **body))["usage"] == usage(49, 2, cached=48)
    chunks = await sse(client, TEXT, **body, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == usage(49, 2, cached=48)
    several = await post(client, TEXT, prompt=[prompt, prompt], n=2, max_tokens=1)
    assert several["usage"] == usage(98, 4, cached=96)


async def test_a_cache_salt_keeps_prefixes_apart(client: httpx.AsyncClient) -> None:
    body = {"prompt": "salted " * 7, "max_tokens": 2}
    for salt in ("one tenant", "another"):
        assert (await post(client, TEXT, **body, cache_salt=salt))["usage"] == usage(49, 2)
        assert (await post(client, TEXT, **body, cache_salt=salt))["usage"] == usage(49, 2, cached=48)


async def test_models_are_listed_and_known_by_name_path_and_default(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["fake"]
    assert listed["data"][0]["max_model_len"] == 512
    for name in ("fake", "/models/fake.gguf", "default"):
        await post(client, TEXT, model=name, prompt="a", max_tokens=1)
    assert (await client.get("/v1/models/fake")).status_code == 200
    for response in (await client.get("/v1/models/gpt-5"), await client.post(TEXT, json={"model": "x", "prompt": "a"})):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


async def test_the_config_tells_limits_and_that_no_gap_is_planned_for(client: httpx.AsyncClient) -> None:
    config = (await client.get("/v1/config")).json()
    assert (config["model"], config["max_model_len"], config["max_num_batched_tokens"]) == ("fake", 512, 64)
    assert (config["itl_ms"], config["promise"], config["pace"]) == (None, None, None)


async def test_labels_that_ask_for_nothing_are_accepted(client: httpx.AsyncClient) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "tools": [], "tool_choice": "none", "store": False, "n": 1}
    await post(client, CHAT, **HELLO, **harmless, response_format={"type": "text"}, stop=None, seed=None, max_tokens=1)


BAD_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"colour": 1}, "colour", "unknown field"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"store": True}, "store", "not supported"),
    ({"parallel_tool_calls": 0}, "parallel_tool_calls", "not supported"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"include_progress": True}}, "stream_options.include_progress", "unknown"),
    ({"temperature": "hot"}, "temperature", "expected"),
    ({"temperature": 3}, "temperature", "between 0 and 2"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"n": 0}, "n", "between 1 and 128"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "at least 1"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": [""]}, "stop", "empty string"),
    ({"stop_token_ids": [259]}, "stop_token_ids", "0 to 258"),
    ({"logit_bias": {"999": 1}}, "logit_bias", "0 to 258"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "between -100 and 100"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "max_tokens"),
    ({"seed": 2**70}, "seed", "64 bits"),
    ({"priority": 2**31}, "priority", "32 bits"),
    ({"cache_salt": ""}, "cache_salt", "1 to 1024"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "known are"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "unknown field"),
    ({"messages": [{"role": "user", "content": "x", "name": "bo"}]}, "messages[0].name", "not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "only text",
    ),
    ({"messages": [{"role": "user", "content": "x" * 510}]}, "messages", "516 tokens; the context holds 512"),
    (
        {"messages": [{"role": "user", "content": "x" * 20_000}]},
        "messages",
        "20000 characters, at least 625 tokens; 512 fit",
    ),
]


@pytest.mark.parametrize(("extra", "param", "words"), BAD_CHAT)
async def test_what_cannot_be_honoured_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, extra: dict[str, Any], param: str, words: str
) -> None:
    response = await client.post(CHAT, json={**HELLO, **extra})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


BAD_TEXT: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [1, "a"]}, "prompt", "must be"),
    ({"prompt": [1, True]}, "prompt", "must be"),
    ({"prompt": {"a": 1}}, "prompt", "must be"),
    ({"prompt": None}, "prompt", "must be"),
    ({}, "prompt", "missing"),
    ({"prompt": [259]}, "prompt", "0 to 258"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": [10**30]}, "prompt", "0 to 258"),
    ({"prompt": "x" * 512}, "prompt", "512"),
    ({"prompt": ["a"] * 129}, "n", "at most 128"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20"),
    ({"prompt": "a", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "not available in a stream"),
    ({"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs", "must not differ"),
    ({"prompt": "a", "prompt_logprobs_start": 2}, "prompt_logprobs_start", "unknown field"),
    ({"prompt": "a", "echo": "yes"}, "echo", "bool"),
    ({"prompt": "a", "best_of": 2}, "best_of", "not supported"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"prompt": "a", "messages": []}, "messages", "unknown field"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD_TEXT)
async def test_a_completion_that_cannot_be_served_is_a_400(
    client: httpx.AsyncClient, body: dict[str, Any], param: str, words: str
) -> None:
    response = await client.post(TEXT, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "headers", "status", "words"),
    [
        (b"{", {}, 400, "not valid JSON"),
        (b"", {}, 400, "not valid JSON"),
        (b"[]", {}, 400, "expected `object`"),
        (b"\xff\xfe", {}, 400, "JSON"),
        (b'{"prompt": "\xff"}', {}, 400, "UTF-8"),
        (b'{"prompt": "\\ud800"}', {}, 400, "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', {}, 400, "JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 50_000, {}, 400, "nested"),
        (b"{}", {"content-type": "text/plain"}, 415, "application/json"),
        (b'{"prompt": "' + b"x" * 200_000 + b'"}', {}, 413, "larger than 200000"),
    ],
)
async def test_a_body_that_is_no_request_is_refused(
    client: httpx.AsyncClient, content: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    response = await client.post(TEXT, content=content, headers={"content-type": "application/json", **headers})
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]


async def test_wrong_paths_and_methods_answer_in_the_same_form(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v2")).json()["error"]["message"].startswith("there is nothing at /v2")
    response = await client.get(CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "error" in response.json()


async def test_a_failing_step_is_a_503_and_in_a_stream_its_last_event(client: httpx.AsyncClient) -> None:
    response = await client.post(TEXT, json={"prompt": "!bug", "max_tokens": 3})
    assert response.status_code == 503
    assert "a bug of the executor" in response.json()["error"]["message"]
    chunks = await sse(client, TEXT, prompt="!bug", max_tokens=3)
    assert "a bug of the executor" in chunks[-1]["error"]["message"]
    assert (await client.get("/health")).status_code == 200


async def test_a_bad_request_disturbs_no_stream(client: httpx.AsyncClient) -> None:
    stream = asyncio.create_task(sse(client, TEXT, prompt="abc", max_tokens=60))
    for body, _, _ in BAD_TEXT:
        await client.post(TEXT, json=body)
    assert streamed_text(await stream) == "abc" * 20


async def test_metrics_count_what_happened(client: httpx.AsyncClient, service: EngineService) -> None:
    before = await metrics(client)
    await post(client, TEXT, prompt="abcdef", max_tokens=5)
    for _ in range(2):
        await post(client, TEXT, prompt="hit rate and bytes of the prefix", max_tokens=1)
    after = await metrics(client)

    def grown(name: str) -> float:
        return after[name] - before[name]

    label = '{model_name="fake"}'
    assert grown(f"vllm:prompt_tokens_total{label}") == 6 + 32 + 32
    assert grown(f"vllm:generation_tokens_total{label}") == 7
    assert grown('vllm:request_success_total{model_name="fake",finished_reason="length"}') == 3
    assert grown(f"legato_step_duration_seconds_count{label}") == 7
    assert grown(f"vllm:time_to_first_token_seconds_count{label}") == 3
    assert grown(f"vllm:inter_token_latency_seconds_count{label}") == 4
    assert grown(f"vllm:prefix_cache_queries_total{label}") == 6 + 32 + 32
    assert grown(f"vllm:prefix_cache_hits_total{label}") == 16
    assert 0 < after[f"legato_prefix_cache_hit_rate{label}"] < 1
    assert after[f"legato_prefix_cache_bytes{label}"] >= 2 * 100
    assert after[f"vllm:num_requests_running{label}"] == 0
    assert after[f"legato_kv_free_blocks{label}"] == after[f"legato_kv_blocks{label}"]
    assert after[f"legato_engine_up{label}"] == 1


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    page = (await client.get("/metrics")).text
    samples, types = {}, set()
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            assert line.split()[2] not in types, "a metric is declared twice"
            types.add(line.split()[2])
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert name not in samples
            samples[name] = float(value)
    assert page.endswith("\n")
    return samples
