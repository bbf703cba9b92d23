"""All that `make bench` measures, one after the other: scheduler, kernels, engine, and the peers that are set up.

python benchmarks/run.py [--model smollm2-135m] [--rounds 5]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from legato.models.pull import resolve

HERE = Path(__file__).resolve().parent


def run(title: str, *command: str) -> None:
    """One benchmark, its output as it comes; ends the run if it fails."""
    print(f"\n== {title}\n   {' '.join(command)}\n", flush=True)
    subprocess.run([sys.executable, *command], cwd=HERE.parent, check=True)


def dequantised(model: str) -> list[str]:
    """`--weights FOLDER` of the file's dequantised weights, made where the environment for that is; else nothing."""
    folder = HERE / "peers" / f".weights-{Path(model).stem}"
    python = HERE / "peers" / ".venv-transformers_cpu" / "bin" / "python"
    if not folder.exists() and python.exists():
        partial = folder.with_name(folder.name + ".part")
        script = str(HERE / "peers" / "dequantise.py")
        subprocess.run([str(python), script, "--model", model, "--out", str(partial)], check=True)
        partial.rename(folder)
    return ["--weights", str(folder)] if folder.exists() else []


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", default="5", help="of the comparison with the peers")
    options = parser.parse_args()
    model = str(resolve(options.model))
    run("Planning a step", "benchmarks/scheduler.py")
    run("Linear layers against this machine's limits", "benchmarks/kernels/linear.py")
    run("Attention", "benchmarks/kernels/attention.py")
    run("What the server costs", "benchmarks/server_overhead.py")
    rounds = ["--rounds", options.rounds]
    run("Legato and the peers, in turn", "benchmarks/compare.py", "--model", model, *rounds, *dequantised(model))


if __name__ == "__main__":
    main()
