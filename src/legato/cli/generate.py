"""`legato generate`: complete prompts from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from legato.cli import options
from legato.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from legato.llm import Completion


def generate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help="The first argument is the model if it is an alias, a file, a folder or a hub id; each other one is a"
            " prompt. Without a prompt, standard input is.",
            show_default=False,
        ),
    ] = None,
    max_tokens: options.MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the chat template.")] = False,
    as_json: options.AsJson = False,
    max_num_batched_tokens: options.StepTokens = 512,
    max_model_len: options.ModelLength = None,
    kv_dtype: options.KvDtype = "f16",
    activations: options.Activations = "int8",
    quantize: options.Quantize = None,
    threads: options.Threads = 0,
    chat_template: options.ChatTemplate = None,
) -> None:
    """Complete prompts, here and now.

    Examples:

    [bold]legato generate "The sky is blue because"[/bold]

    [bold]legato generate --chat "Write a haiku about rain" --temperature 0.7[/bold]

    [bold]cat notes.txt | legato generate gemma3-270m --max-tokens 50[/bold]

    [bold]legato generate smollm2-135m "One" "Two" "Three" --json[/bold] · one line of JSON each
    """
    from legato.engine.params import SamplingParams
    from legato.llm import LLM

    model, prompts = _model_and_prompts(words or [])
    if not prompts:
        if sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
        prompts = [sys.stdin.read()]
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=tuple(stop or ())
    )
    with options.loading_bar(quiet=as_json) as report:
        llm = LLM(
            model,
            on_load=report,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=min(64, max_num_batched_tokens),
            max_model_len=max_model_len,
            kv_dtype=kv_dtype,
            activations=activations,
            quantize=quantize,
            threads=threads,
            chat_template=None if chat_template is None else str(chat_template),
        )
    tokens: list[Any] = [llm.chat_tokens([{"role": "user", "content": p}]) for p in prompts] if as_chat else [*prompts]
    if len(prompts) == 1 and not as_json:
        for piece in llm.stream(tokens[0], params):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    for prompt, completion in zip(prompts, llm.generate(tokens, params), strict=True):
        typer.echo(_json(prompt, completion) if as_json else f"{prompt}\n{completion.text}\n")


def _model_and_prompts(words: list[str]) -> tuple[str, list[str]]:
    """Tells the model's name from the prompts."""
    from legato.models.aliases import ALIASES
    from legato.models.hub import looks_like_id

    if words:
        first = words[0]
        if first in ALIASES or first.lower().endswith(".gguf") or (len(first) < 200 and Path(first).exists()):
            return first, words[1:]
        if looks_like_id(first) and len(words) > 1:
            return first, words[1:]
    return DEFAULT_MODEL, words


def _json(prompt: str, completion: Completion) -> str:
    return json.dumps(
        {
            "prompt": prompt,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(completion.prompt),
            "completion_tokens": len(completion.token_ids),
            "cached_tokens": completion.cached_tokens,
            "ttft_s": round(completion.ttft_s, 4),
        },
        ensure_ascii=False,
    )
