"""Log-probabilities of prompts, and echoes, over ASGI. In the fake engine "b" after "a" is one step less likely."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.test_api import CHAT, HELLO, TEXT, post, sse, streamed_text, usage

pytestmark = pytest.mark.asyncio(loop_scope="module")


def entry(token: str, logprob: float, rank: int) -> tuple[str, dict[str, Any]]:
    return str(ord(token)), {"logprob": logprob, "rank": rank, "decoded_token": token}


async def test_a_prompt_comes_with_one_entry_a_token_the_first_null_as_in_vllm(client: httpx.AsyncClient) -> None:
    answer = await post(client, TEXT, prompt="abd", max_tokens=2, prompt_logprobs=1)
    (choice,) = answer["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        dict([entry("b", -1.0, 2), entry("a", 0.0, 1)]),
        dict([entry("d", -2.0, 3), entry("b", 0.0, 1)]),
    ]
    assert list(choice["prompt_logprobs"][1]) == ["98", "97"], "the token itself comes first"
    assert (choice["text"], choice["logprobs"]) == ("ab", None)
    assert "prompt_logprobs" not in (await post(client, TEXT, prompt="abd", max_tokens=2))["choices"][0]


async def test_every_prompt_has_its_own_and_n_choices_have_the_same(client: httpx.AsyncClient) -> None:
    answer = await post(client, TEXT, prompt=["ab", "cdd" * 40, "e"], n=2, max_tokens=3, prompt_logprobs=0)
    lengths = [len(choice["prompt_logprobs"]) for choice in answer["choices"]]
    assert lengths == [2, 2, 120, 120, 1, 1]
    for first, second in zip(answer["choices"][::2], answer["choices"][1::2], strict=True):
        assert first["prompt_logprobs"] == second["prompt_logprobs"]
    assert answer["choices"][2]["prompt_logprobs"][:3] == [
        None,
        dict([entry("d", -1.0, 2)]),
        dict([entry("d", 0.0, 1)]),
    ]


async def test_chat_has_them_beside_its_choices_as_in_vllm(client: httpx.AsyncClient) -> None:
    answer = await post(client, CHAT, **HELLO, max_tokens=1, n=2, prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == len("user:hi|")
    assert answer["prompt_logprobs"][1] == dict([entry("s", -257.0, 258)])
    assert "prompt_logprobs" not in await post(client, CHAT, **HELLO, max_tokens=1)
    response = await client.post(CHAT, json={**HELLO, "stream": True, "prompt_logprobs": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_an_echo_is_the_prompt_before_its_completion(client: httpx.AsyncClient) -> None:
    answer = await post(client, TEXT, prompt=["abc", "é"], echo=True, n=2, max_tokens=4)
    assert [choice["text"] for choice in answer["choices"]] == ["abcabca"] * 2 + ["ééé"] * 2
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"] == usage(5, 16)
    assert (await post(client, TEXT, prompt=[97, 98], echo=True, max_tokens=1))["choices"][0]["text"] == "aba"
    chunks = await sse(client, TEXT, prompt=["abc", "de"], echo=True, max_tokens=3)
    assert [streamed_text(chunks, index) for index in range(2)] == ["abcabc", "dededed"[:5]]


COLUMNS = {
    "tokens": ["a", "b", "d", "a", "b"],
    "token_logprobs": [None, -1.0, -2.0, -0.25, -0.25],
    "top_logprobs": [None, {"a": 0.0}, {"b": 0.0}, {"a": -0.25}, {"b": -0.25}],
    "text_offset": [0, 1, 2, 3, 4],
}


async def test_an_echo_with_logprobs_has_those_of_the_prompt_first(client: httpx.AsyncClient) -> None:
    answer = await post(client, TEXT, prompt="abd", echo=True, logprobs=1, max_tokens=2)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"]) == ("abdab", COLUMNS)
    assert "prompt_logprobs" not in choice
    both = await post(client, TEXT, prompt="abd", echo=True, logprobs=1, prompt_logprobs=1, max_tokens=2)
    assert both["choices"][0]["logprobs"] == COLUMNS
    assert len(both["choices"][0]["prompt_logprobs"]) == 3


async def test_an_echo_with_logprobs_streams_the_prompt_in_the_first_chunk_of_each_choice(
    client: httpx.AsyncClient,
) -> None:
    chunks = await sse(client, TEXT, prompt="abd", n=3, echo=True, logprobs=1, max_tokens=2)
    for index in range(3):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert choices[0]["text"] == "abd"
        columns = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert {name: [value for column in columns for value in column[name]] for name in COLUMNS} == COLUMNS


async def test_an_echo_of_a_prompt_that_ends_at_once_still_has_its_logprobs(client: httpx.AsyncClient) -> None:
    answer = await post(client, TEXT, prompt=[0, 97], echo=True, logprobs=0, max_tokens=5)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("\0a", "stop")
    assert choice["logprobs"]["token_logprobs"] == [None, -97.0]


async def test_a_long_prompt_with_logprobs_leaves_other_streams_alone(client: httpx.AsyncClient) -> None:
    answer = await post(client, TEXT, prompt=["x" * 400, "abc"], max_tokens=3, prompt_logprobs=2)
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [400, 3]
    cached = await post(client, TEXT, prompt="x" * 400, max_tokens=1, prompt_logprobs=0)
    assert cached["usage"] == usage(400, 1), "nothing of it may come from the cache"
    assert (await post(client, TEXT, prompt="x" * 400, max_tokens=1))["usage"] == usage(400, 1, cached=384)
