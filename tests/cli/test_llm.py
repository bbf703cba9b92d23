"""Offline use: `LLM` with an engine that repeats its prompt."""

from __future__ import annotations

import pytest

from legato import LLM, SamplingParams
from legato.errors import ConfigError, EngineError, PromptTooLong, RequestError

pytestmark = pytest.mark.usefixtures("fake_llm")


def test_prompts_are_completed_in_their_order() -> None:
    completions = LLM("fake", max_num_seqs=2).generate(["abc", "xy", [104, 105]], SamplingParams(max_tokens=5))
    assert [c.text for c in completions] == ["abcab", "xyxyx", "hihih"]
    assert {c.finish_reason for c in completions} == {"length"}
    assert all(c.ttft_s > 0 for c in completions)


def test_one_prompt_may_come_alone_as_text_or_tokens() -> None:
    llm = LLM("fake")
    assert [c.text for c in llm.generate("ab", SamplingParams(max_tokens=3))] == ["aba"]
    assert [c.text for c in llm.generate([97, 98], SamplingParams(max_tokens=3))] == ["aba"]


def test_n_sequences_stand_together() -> None:
    completions = LLM("fake").generate(["a", "b"], SamplingParams(max_tokens=2, n=2))
    assert [(c.text, c.index) for c in completions] == [("aa", 0), ("aa", 1), ("bb", 0), ("bb", 1)]


def test_stop_strings_end_tokens_and_free_the_engine() -> None:
    llm = LLM("fake")
    (completion,) = llm.generate("hello world", SamplingParams(max_tokens=100, stop=("o w",)))
    assert (completion.text, completion.finish_reason) == ("hell", "stop")
    (ended,) = llm.generate([104, 105, 0], SamplingParams(max_tokens=100))
    assert (ended.text, ended.finish_reason, ended.token_ids) == ("hi", "stop", [104, 105, 256])
    llm.engine.step()
    llm.engine.state.check()
    assert llm.engine.state.free_blocks == llm.engine.state.total_blocks


def test_chat_takes_one_conversation_or_several() -> None:
    llm = LLM("fake")
    turn = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(turn, SamplingParams(max_tokens=8))
    assert one.text == "user:hi|"
    assert [c.text for c in llm.chat([turn, turn], SamplingParams(max_tokens=4))] == ["user", "user"]


def test_a_stream_left_early_frees_its_blocks() -> None:
    llm = LLM("fake")
    stream = llm.stream("abc", SamplingParams(max_tokens=100))
    assert next(stream) == "a"
    stream.close()
    llm.engine.step()
    assert not llm.engine.has_work
    assert "".join(llm.stream("xyz", SamplingParams(max_tokens=4))) == "xyzx"


def test_what_cannot_run_is_refused_before_anything_does() -> None:
    llm = LLM("fake")
    with pytest.raises(PromptTooLong, match="600 tokens; 512 fit"):
        llm.generate(["ok", "x" * 600])
    with pytest.raises(RequestError, match="empty"):
        llm.generate("")
    with pytest.raises(RequestError, match="0 to 258"):
        llm.generate([[1000]])
    assert not llm.engine.has_work
    with pytest.raises(ConfigError, match=r"no option 'max_seqs'; there are .*max_num_seqs"):
        LLM("fake", max_seqs=3)


def test_a_failing_step_raises_its_reason() -> None:
    with pytest.raises(EngineError, match="a bug of the executor"):
        LLM("fake").generate("!bug")


def test_logprobs_have_an_entry_a_token() -> None:
    (completion,) = LLM("fake").generate("ab", SamplingParams(max_tokens=3, logprobs=2))
    assert [entry.top[0][0] for entry in completion.logprobs] == completion.token_ids


def test_the_progress_bar_is_on_stderr_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    LLM("fake").generate(["abc"] * 3, SamplingParams(max_tokens=5), progress=True)
    assert capsys.readouterr().out == ""
