"""Draws the figures of the documents from the JSON in docs/data: `make figures`.

    python docs/figures.py               all of them
    python docs/figures.py collect       computes docs/data/slowdown.json: arithmetic, no measurement

The other files in docs/data are what these commands printed or kept:

    legato demo --json > docs/data/demo.json
    python -m benchmarks.pace drift --data docs/data/drift.json
    python -m benchmarks.pace change --data docs/data/change.json
    legato bench interference --budget-ms 60 --duration 30 --data docs/data/pace.json    # of legato serve --itl-ms 60
    legato tune --budgets 64,96,128,192,256,384,512,1024 --json > docs/data/tune.json
    legato simulate --device this --rate 1.2 --requests 2000 --slo-ttft-ms 2000 --slo-itl-ms 200 --json > docs/data/simulate.json
"""  # noqa: E501  (commands are not wrapped)

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA, IMAGES = HERE / "data", HERE / "images"
sys.path.insert(0, str(HERE.parent))

from benchmarks.pace import draw_change, draw_drift  # noqa: E402

from legato.bench.plot import Picture  # noqa: E402
from legato.bench.plot import draw_svg as draw_interference  # noqa: E402
from legato.demo.document import Demo  # noqa: E402
from legato.demo.picture import draw_svg  # noqa: E402
from legato.plots.simulation import draw_simulation  # noqa: E402
from legato.plots.slowdown import draw_slowdown  # noqa: E402
from legato.plots.tuning import draw_tuning  # noqa: E402

_PROMPT, _CHUNKS = 8000, (32, 64, 128, 256, 512, 1024, 2048, 4096, 8000)
_DEVICES = ("h100", "a100", "l4", "laptop")


def written(draw: Callable[[Any], str]) -> Callable[[Any, Path], None]:
    """A drawing that is a text, as one that writes a file."""
    return lambda data, path: path.write_text(draw(data), encoding="utf-8") and None


FIGURES: dict[str, Callable[[Any, Path], None]] = {
    "demo": written(lambda data: draw_svg(Demo.from_dict(data))),
    "drift": written(draw_drift),
    "change": written(draw_change),
    "pace": written(lambda data: draw_interference(Picture(**data))),
    "slowdown": draw_slowdown,
    "tune": draw_tuning,
    "simulate": draw_simulation,
}


def collect() -> None:
    """Time of a prompt by the size of its chunks, idealised, alone on the device."""
    from legato.sim import catalog
    from legato.sim.ideal import Ideal
    from legato.sim.prompt import plan_prompt

    model, rows = catalog.model("llama-3.1-8b"), {}
    for key in _DEVICES:
        device = catalog.device(key)
        ideal = Ideal(model, device, weight_bits=4.5 if key == "laptop" else 16)
        whole = plan_prompt(ideal.cost, ideal.parts, prompt=_PROMPT)
        plans = (plan_prompt(ideal.cost, ideal.parts, prompt=_PROMPT, chunk=chunk) for chunk in _CHUNKS)
        rows[device.name] = [round(plan.slowdown(whole), 4) for plan in plans]
    data = {"model": model.name, "prompt": _PROMPT, "chunks": _CHUNKS, "slowdown": rows}
    (DATA / "slowdown.json").write_text(json.dumps(data) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    if arguments == ["collect"]:
        collect()
    elif arguments:
        sys.exit(__doc__)
    for name, draw in FIGURES.items():
        source = DATA / f"{name}.json"
        draw(json.loads(source.read_text(encoding="utf-8").splitlines()[-1]), IMAGES / f"{name}.svg")
        print(f"docs/images/{name}.svg from docs/data/{name}.json")


if __name__ == "__main__":
    main(sys.argv[1:])
