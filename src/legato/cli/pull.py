"""`legato pull`: fetch a model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from legato.cli import options
from legato.config import DEFAULT_MODEL, format_size


def pull(
    name: Annotated[str, typer.Argument(help="An alias (see --list) or a hub id.")] = DEFAULT_MODEL,
    listing: Annotated[bool, typer.Option("--list", help="List the aliases instead.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Fetch a model and print where it is.

    Kept under $LEGATO_HOME (default: ~/.cache/legato). An interrupted pull goes on where it stopped.
    """
    from legato.models.aliases import ALIASES
    from legato.models.pull import resolve

    if listing:
        if as_json:
            rows = [{"name": a.name, "bytes": a.nbytes, "file": a.file, "licence": a.licence} for a in ALIASES.values()]
            typer.echo(json.dumps(rows))
            return
        for alias in ALIASES.values():
            default = "  (default)" if alias.name == DEFAULT_MODEL else ""
            typer.echo(f"{alias.name:16}{format_size(alias.nbytes):>9}  {alias.licence}{default}")
        return
    with options.loading_bar() as report:
        path = resolve(name, lambda done, total: report(f"fetching {name}", done, total), options.say)
    typer.echo(json.dumps({"name": name, "path": str(path)}) if as_json else str(path))
