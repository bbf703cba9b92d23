"""The demo as one HTML file: the drawing, the table, what was run and where. Needs nothing from the network."""

from __future__ import annotations

from html import escape

from legato.demo.document import Demo
from legato.demo.figures import sum_up
from legato.demo.picture import draw_svg, readers
from legato.demo.table import COLUMNS, rows_of

_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.55 system-ui,-apple-system,'Segoe UI',sans-serif;"
    "max-width:58rem;margin:2.5rem auto;padding:0 1rem}h1{font-size:1.35rem;margin:0 0 .75rem}"
    ".said{font-size:1.1rem;margin:0 0 1.75rem}"
    "svg{width:100%;height:auto}table{border-collapse:collapse;margin:1.75rem 0;width:100%}"
    "th,td{text-align:right;padding:.4rem 0 .4rem 1.5rem;border-bottom:1px solid #8884;"
    "font-variant-numeric:tabular-nums}th:first-child,td:first-child{text-align:left;padding-left:0}"
    "th{font-weight:600}.dim{opacity:.65}p{max-width:52rem}code{font:13px ui-monospace,monospace}"
)
_HOW = (
    "How to read it: at each moment the height is how long a reader of a stream waits in all for the token that comes"
    " next, from the one before it. A stall is as wide and as high as it lasts; the scale is logarithmic."
)


def draw_html(demo: Demo) -> str:
    """The page."""
    head = "".join(f"<th>{escape(column)}</th>" for column in ("", *COLUMNS))
    body = "".join(
        f'<tr><td>{escape(name)} <span class="dim">{escape(means)}</span></td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, means, cells in rows_of(demo)
    )
    cores = "a core" if demo.cores == 1 else f"{demo.cores} cores"
    note = f"{demo.machine}, {cores} · {demo.model}, {readers(demo)} · {demo.date} · legato {demo.legato}"
    remarks = "".join(f"<p><strong>{escape(remark)}</strong></p>" for remark in demo.remarks)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Legato: {escape(demo.model)}</title><style>{_STYLE}</style></head><body>\n"
        "<h1>What chunks of a prompt are for</h1>\n"
        f'<p class="said">{escape(sum_up(demo.setup, demo.runs))}</p>\n{draw_svg(demo)}'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>\n"
        f'{remarks}<p>{_HOW}</p><p class="dim">{escape(note)}</p>'
        f'<p class="dim">Made by <code>{escape(demo.command)}</code></p></body></html>\n'
    )
