"""`--config FILE`: options of a command from a TOML file. What is given on the command line counts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from legato.errors import ConfigError

_SELF = "config_file"


def _load(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the file's values the defaults of the command. Raises ConfigError, with a list, for what is no option."""
    if path is None or context.resilient_parsing:
        return path
    known = {name for option in context.command.params if (name := option.name) is not None and name != _SELF}
    values = read_config(path)
    for name in values:
        if name not in known:
            listed = ", ".join(sorted(option.replace("_", "-") for option in known))
            raise ConfigError(f"{path}: there is no option '{name.replace('_', '-')}'; there are {listed}")
    context.default_map = {**(context.default_map or {}), **values}
    return path


def read_config(path: Path) -> dict[str, Any]:
    """The options in a file, dashes as underscores. Raises ConfigError for one that cannot be read."""
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}; a line is an option, as in itl-ms = 60") from error
    for name, value in values.items():
        if isinstance(value, dict):
            raise ConfigError(f"{path}: [{name}] is a table; options are lines without one, as in itl-ms = 60")
    return {name.replace("-", "_"): value for name, value in values.items()}


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file of these options, as legato tune writes it. What is given here counts more.",
        is_eager=True,
        callback=_load,
        dir_okay=False,
        metavar="FILE",
    ),
]
