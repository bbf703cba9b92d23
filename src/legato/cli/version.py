"""`legato version`."""

from __future__ import annotations

import json
import platform

import typer

from legato.cli import options


def version(as_json: options.AsJson = False) -> None:
    """Print the version, and which kernels this machine runs."""
    import legato

    try:
        from legato import _native

        kernels = str(_native.isa())
    except ImportError:
        kernels = "not built"
    facts = {"legato": legato.__version__, "python": platform.python_version(), "kernels": kernels}
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        typer.echo(" · ".join(f"{name} {value}" for name, value in facts.items()))
