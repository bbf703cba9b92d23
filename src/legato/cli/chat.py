"""`legato chat`: talk to a model in the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli import options
from legato.config import DEFAULT_MODEL
from legato.errors import PromptTooLong

if TYPE_CHECKING:
    from rich.console import Console

    from legato.engine.params import SamplingParams
    from legato.llm import LLM

HELP = """  /reset          forget the conversation
  /system TEXT    set the system prompt and start again; without TEXT, remove it
  /help           this
  /exit           leave (so does Ctrl-D)

  Ctrl-C stops an answer. A line that ends in \\ goes on in the next."""


def chat(
    model: options.Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="The system prompt.", show_default="the template's own")] = None,
    max_tokens: options.MaxTokens = 1024,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.7,
    top_p: options.TopP = 0.95,
    seed: options.Seed = None,
    max_num_batched_tokens: options.StepTokens = 512,
    max_model_len: options.ModelLength = None,
    kv_dtype: options.KvDtype = "f16",
    activations: options.Activations = "int8",
    quantize: options.Quantize = None,
    threads: options.Threads = 0,
    chat_template: options.ChatTemplate = None,
) -> None:
    """Talk to a model in the terminal.

    Examples:

    [bold]legato chat[/bold] · the default model

    [bold]legato chat gemma3-270m --system "You answer in French."[/bold]
    """
    from rich.console import Console

    from legato.engine.params import SamplingParams
    from legato.llm import LLM

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with options.loading_bar() as report:
        llm = LLM(
            model,
            on_load=report,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=1,
            max_model_len=max_model_len,
            kv_dtype=kv_dtype,
            activations=activations,
            quantize=quantize,
            threads=threads,
            chat_template=None if chat_template is None else str(chat_template),
        )
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in input())
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"[bold]{options.short_name(model)}[/] [dim]· {llm.info.description}"
        " · /help for what you can type, Ctrl-D to leave[/]\n"
    )
    Talk(llm, params, console, system).run()


class Talk:
    """One conversation at a terminal, or with lines from a pipe."""

    def __init__(self, llm: LLM, params: SamplingParams, console: Console, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._console = console
        self._system = system
        self._turns: list[dict[str, str]] = []

    def run(self) -> None:
        """Until Ctrl-D or /exit."""
        while True:
            try:
                line = self._read()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("\n[dim]Ctrl-D or /exit leaves.[/]")
                continue
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _read(self) -> str:
        prompt = "\001\033[1;36m\002›\001\033[0m\002 " if sys.stdin.isatty() and self._console.is_terminal else ""
        line = input(prompt)
        while line.endswith("\\"):
            line = line[:-1] + "\n" + input("  " if prompt else "")
        return line.strip()

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self._turns.clear()
            self._console.print("[dim]The conversation is forgotten.[/]\n")
        elif name == "/system":
            self._system = rest.strip() or None
            self._turns.clear()
            self._console.print(
                f"[dim]{'System prompt set' if self._system else 'No system prompt'}; we start again.[/]\n"
            )
        elif name == "/help":
            self._console.print(HELP + "\n", markup=False)
        else:
            self._console.print(f"[dim]There is no {name}; /help lists what there is.[/]\n")

    def _answer(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})
        prompt = self._prompt()
        if prompt is None:
            self._turns.pop()
            return
        pieces: list[str] = []
        start_s, first_s = time.perf_counter(), 0.0
        tokens_before = self._generated()
        stopped = False
        try:
            for piece in self._llm.stream(prompt, self._params):
                if not pieces:
                    first_s = time.perf_counter()
                    piece = piece.lstrip()
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            stopped = True
        end_s = time.perf_counter()
        self._turns.append({"role": "assistant", "content": "".join(pieces)})
        tokens = self._generated() - tokens_before
        note = f"{tokens} tokens"
        if tokens > 1 and first_s:
            note += f" · {(tokens - 1) / max(end_s - first_s, 1e-9):.0f} tok/s · first after {first_s - start_s:.2f} s"
        self._console.print(f"\n[dim]{note}{' · stopped' if stopped else ''}[/]\n")

    def _generated(self) -> int:
        return self._llm.generated_tokens

    def _prompt(self) -> tuple[int, ...] | None:
        """The conversation's tokens. Forgets the oldest turns when it grows out of the context, and says so."""
        context = self._llm.engine.state.context
        forgot = False
        while True:
            head = [{"role": "system", "content": self._system}] if self._system else []
            tokens = self._llm.chat_tokens([*head, *self._turns])
            if len(tokens) + min(64, context // 2) <= context:
                break
            if len(self._turns) <= 2:
                error = PromptTooLong(f"that is {len(tokens)} tokens; {context} fit, the answer included")
                self._console.print(f"[yellow]{error}[/]\n")
                return None
            del self._turns[:2]
            forgot = True
        if forgot:
            self._console.print("[dim]The context is full: the oldest turns are forgotten.[/]")
        return tokens
