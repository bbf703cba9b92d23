"""The core needs nothing but the standard library, and of that no clock and no dice."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in (SOURCE / "legato" / "core").rglob("*.py")
    if path.name != "__init__.py"
)


@pytest.mark.parametrize("module", MODULES)
def test_a_core_module_imports_alone_and_brings_in_nothing_but_the_standard_library(module: str) -> None:
    script = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    third_party = {n for n in names if n.split(".")[0] not in {*sys.stdlib_module_names, "legato", "__main__"}}
    assert not third_party
    others = {n for n in names if n.startswith("legato.") and n.split(".")[1] not in ("core", "errors")}
    assert not others


@pytest.mark.parametrize("module", MODULES)
def test_no_core_module_reads_a_clock_throws_dice_or_does_io(module: str) -> None:
    tree = ast.parse((SOURCE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not imported & {
        "time",
        "datetime",
        "random",
        "secrets",
        "uuid",
        "os",
        "io",
        "socket",
        "threading",
        "asyncio",
    }


def test_there_are_core_modules_to_look_at() -> None:
    assert "legato.core.schedule" in MODULES
