"""The reader against bytes on a real socket, and the dialect of servers that take less."""

from __future__ import annotations

import asyncio
import time

import pytest

from bench.fake_server import STREAM_HEAD, FakeServer, chunked, document, event, serving
from legato.bench.client import Address, Client, Reply
from legato.bench.dialect import Dialect, Server, learn_dialect
from legato.errors import ConfigError, ServerUnreachable

IDS = range(300, 1000)


async def ask(server: FakeServer, **body: object) -> Reply:
    reply = Reply()
    async with serving(server):
        client = Client(Address.of(server.url), time.perf_counter, api_key="secret")
        await client.connect()
        await client.stream("/completions", {"stream": True, "max_tokens": 5, "prompt": "x", **body}, reply)
    return reply


async def learn(server: FakeServer) -> Dialect:
    async with serving(server):
        client = Client(Address.of(server.url), time.perf_counter)
        await client.connect()
        return await learn_dialect(client, None, IDS)


async def test_every_chunk_with_text_is_stamped_when_it_comes() -> None:
    server = FakeServer(gap_s=0.03)
    reply = await ask(server)
    gaps = [b - a for a, b in zip(reply.arrivals_s, reply.arrivals_s[1:], strict=False)]
    assert len(gaps) == 4 and all(0.025 < gap < 0.2 for gap in gaps)
    assert reply.error is None and reply.first_s == reply.arrivals_s[0]
    assert "Authorization: Bearer secret" in server.asked[0]["head"]


@pytest.mark.parametrize("piece", [1, 2, 7, 64])
async def test_an_answer_reads_alike_wherever_the_network_cuts_it(piece: int) -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    body = role + b": a comment\r\n\r\n" + event({"choices": [{"delta": {"content": "ä"}}], "usage": None})
    body += event({"choices": [{"text": "b", "finish_reason": "length"}]}).replace(b"\n", b"\r\n")
    body += event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
    raw = STREAM_HEAD + b"".join(chunked(body[at : at + 11]) for at in range(0, len(body), 11)) + b"0\r\n\r\n"
    reply = await ask(FakeServer(raw=raw, piece=piece))
    assert reply.error is None
    assert (len(reply.arrivals_s), reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (2, 7, 2, 3)


async def test_a_token_without_text_is_a_first_token_if_it_is_the_last() -> None:
    body = event({"choices": [{"text": "", "finish_reason": "length"}]})
    reply = await ask(FakeServer(raw=STREAM_HEAD + chunked(body) + b"0\r\n\r\n"))
    assert reply.error is None and reply.ttft_s is not None and reply.arrivals_s == []


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (document({"error": {"message": "too busy"}}, "503 Busy"), "status 503: too busy"),
        (document({"message": "gone"}, "410 Gone"), "status 410: gone"),
        (b"HTTP/1.1 502 Bad\r\ncontent-length: 4\r\n\r\noops", "status 502: oops"),
        (document({"choices": [{"text": "all at once"}]}), "not streamed"),
        (STREAM_HEAD + chunked(event({"choices": [{"text": "a"}]})), "closed the connection"),
        (STREAM_HEAD + chunked(event({"error": {"message": "engine died"}})) + b"0\r\n\r\n", "engine died"),
        (STREAM_HEAD + chunked(b"data: {not json\n\n") + b"0\r\n\r\n", "not understood"),
        (STREAM_HEAD + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n", "without a token"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ""),
        (b"", "closed the connection"),
    ],
)
async def test_what_goes_wrong_is_told_in_the_reply(raw: bytes, words: str) -> None:
    reply = await ask(FakeServer(raw=raw))
    assert reply.error is not None and words in reply.error


async def test_cancelling_closes_the_connection() -> None:
    """It is how a server learns that nobody waits any more."""
    left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(STREAM_HEAD + chunked(event({"choices": [{"text": "a"}]})))
        while await reader.read(100):
            pass
        writer.close()
        left.set()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = Address("127.0.0.1", listener.sockets[0].getsockname()[1], secure=False, root="/v1")
    reply = Reply()
    asking = asyncio.create_task(Client(address, time.perf_counter).stream("/completions", {}, reply))
    await asyncio.sleep(0.2)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(5):
        await left.wait()
    listener.close()
    await listener.wait_closed()
    assert reply.done_s is None and len(reply.arrivals_s) == 1


async def test_a_request_counts_from_when_it_was_due_if_that_is_said() -> None:
    server, reply = FakeServer(), Reply()
    reply.sent_s = -5.0
    async with serving(server):
        await Server(Client(Address.of(server.url), time.perf_counter), Dialect("fake")).complete("x", 1, reply)
    assert reply.sent_s == -5.0


async def test_a_server_that_is_not_there_is_an_error_that_says_what_to_do() -> None:
    server = FakeServer()
    async with serving(server):
        pass
    with pytest.raises(ServerUnreachable, match="legato serve"):
        await Client(Address.of(server.url), time.perf_counter).connect()


def test_an_address_is_read_with_or_without_its_v1() -> None:
    assert Address.of("http://localhost:8000") == Address.of("http://localhost:8000/v1/")
    assert Address.of("https://api.example.com/openai/v1").port == 443
    assert Address.of("http://[::1]:80").is_local and not Address.of("http://10.0.0.1").is_local
    for url in ("localhost:8000", "ftp://x", "http://", "http://x:99999"):
        with pytest.raises(ConfigError, match="--url is"):
            Address.of(url)


async def test_a_server_that_takes_everything_is_asked_for_everything() -> None:
    dialect = await learn(FakeServer())
    assert dialect == Dialect("fake", takes_ids=True, ignores_eos=True, tells_usage=True)


async def test_what_is_refused_is_left_out() -> None:
    dialect = await learn(FakeServer(refuses=("ignore_eos", "stream_options")))
    assert dialect == Dialect("fake", takes_ids=True)
    assert "ignore_eos" not in dialect.body("x", 9)


async def test_where_no_ids_are_taken_words_are_counted_in_tokens() -> None:
    for server in (
        FakeServer(takes_ids=False, tokens_per_word=1.5),
        FakeServer(counts_ids=False),
        FakeServer(refuses=("completions_",), takes_ids=False),
    ):
        dialect = await learn(server)
        assert not dialect.takes_ids
        assert dialect.words.per_word == pytest.approx(server.tokens_per_word)
        assert dialect.words.extra == pytest.approx(2)


async def test_a_server_of_chats_alone_is_asked_in_chats() -> None:
    server = FakeServer()
    original = server._answer

    async def no_completions(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if b"/v1/completions" in line:
            writer.write(document({"detail": "Not Found"}, "404 Not Found"))
            return
        reader._buffer[:0] = line  # type: ignore[attr-defined]
        await original(reader, writer)

    server._answer = no_completions  # type: ignore[method-assign]
    async with serving(server):
        client = Client(Address.of(server.url), time.perf_counter)
        dialect = await learn_dialect(client, None, IDS)
        assert dialect.is_chat and not dialect.takes_ids
        reply = Reply()
        await Server(client, dialect).complete("Hello", 3, reply)
    assert len(reply.arrivals_s) == 3


async def test_a_server_that_refuses_one_word_is_no_server() -> None:
    with pytest.raises(ServerUnreachable, match="no prompt here"):
        await learn(FakeServer(refuses=("prompt", "messages")))
    with pytest.raises(ServerUnreachable, match="does not list a model"):
        await learn(FakeServer(raw=document({"hello": "world"})))
