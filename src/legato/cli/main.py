"""The command `legato`. One file a verb; what a verb needs is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from legato.cli import (
    bench,
    certify,
    chat,
    compare,
    demo,
    explain,
    generate,
    plan,
    pull,
    replay,
    serve,
    simulate,
    tune,
    version,
)
from legato.errors import LegatoError

EPILOG = """Start here:  [bold]legato serve[/bold]   then point any OpenAI client at http://127.0.0.1:8000/v1

What it is about, in a minute:  [bold]legato demo[/bold]"""


class _Legato(TyperGroup):
    """Turns our errors into one line on stderr and status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LegatoError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    name="legato",
    cls=_Legato,
    help="LLM serving that never stalls a token stream: chunked prefill, exact to the bit, on the CPU you have.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo.demo)
app.command()(serve.serve)
app.command()(chat.chat)
app.command()(generate.generate)
app.command()(pull.pull)
app.command()(certify.certify)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(tune.tune)
app.command()(explain.explain)
app.command()(replay.replay)
bench.app.command()(compare.compare)
app.add_typer(bench.app, name="bench")
app.command()(version.version)


def main() -> None:
    """Entry of the console script. Exit status: 0 done, 1 an error that was told, 2 wrong usage, 130 interrupted."""
    app()


if __name__ == "__main__":
    main()
