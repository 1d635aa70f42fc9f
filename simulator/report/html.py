"""The frame of every report: one self-contained HTML page, made of sections.

Nothing is loaded from elsewhere: Plotly, styles and scripts are inside the page, and a content
policy forbids the rest. All text is escaped here; callers pass plain text except where a name says
``html``. The same input gives the same page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.report.figures import Drawing

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
_CONFIG = {"displaylogo": False, "responsive": True, "doubleClick": "reset"}
_FIGURE_MARK = '<div class="plot"'


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading; ``html`` are finished pieces from this module."""

    id: str
    heading: str
    html: Sequence[str]


def page(
    title: str, sections: Sequence[Section], *, subtitle: str = "", lead: str = "", footer: str = ""
) -> str:
    """A whole page. ``lead`` is finished HTML that stands before the first section."""
    body = "\n".join(_section(s) for s in sections)
    script = ""
    if _FIGURE_MARK in body or _FIGURE_MARK in lead:
        from plotly.offline import get_plotlyjs

        script = f"<script>{get_plotlyjs()}</script>\n<script>{asset('page.js')}</script>\n"
    links = "".join(f'<li><a href="#{_name(s.id)}">{escape(s.heading)}</a></li>' for s in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{asset('page.css')}</style>\n</head>\n<body>\n"
        f'<div class="sheet">\n<header>\n<h1>{escape(title)}</h1>\n'
        f"<p>{escape(subtitle)}</p>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n<main>\n'
        f"{lead}\n{body}\n</main>\n<footer>{escape(footer)}</footer>\n</div>\n{script}</body>\n"
        "</html>\n"
    )


def banner(tone: str, verdict: str, text: str) -> str:
    """The verdict: a sign, words and a colour (``fits``, ``risky``, ``does not fit``)."""
    sign = {"fits": "✓", "risky": "!", "does not fit": "✗"}.get(tone, "")
    return (
        f'<div class="banner {_name(tone)}" role="status"><strong>'
        f'<span aria-hidden="true">{sign}</span> {escape(verdict)}</strong>'
        f"<p>{escape(text)}</p></div>"
    )


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """Key figures: (name, value, remark)."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(remark)}</dd></div>"
        for name, value, remark in items
    )
    return f'<dl class="cards">{cells}</dl>'


def notice(heading: str, lines: Sequence[str]) -> str:
    """A box with warnings; empty where there are none."""
    if not lines:
        return ""
    return f'<div class="notice"><strong>{escape(heading)}</strong>{_list(lines)}</div>'


def paragraph(text: str) -> str:
    """A note in plain text."""
    return f'<p class="note">{escape(text)}</p>'


def listing(heading: str, lines: Sequence[str]) -> str:
    """A heading and a list; empty where there is nothing to list."""
    return f"<div><h3>{escape(heading)}</h3>{_list(lines)}</div>" if lines else ""


def columns(*html: str) -> str:
    """Pieces side by side where the screen is wide enough."""
    return f'<div class="columns">{"".join(html)}</div>'


def code(summary: str, text: str, *, is_open: bool = False) -> str:
    """Preformatted text that can be folded away."""
    state = " open" if is_open else ""
    return (
        f"<details{state}><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
    )


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    caption: str = "",
    totals: Iterable[int] = (),
    colours: Mapping[int, str] | None = None,
) -> str:
    """A table that scrolls by itself where it is too wide.

    ``numbers`` are the columns aligned to the right, ``totals`` the rows set off from the others,
    ``colours`` the swatch before a row's first cell.
    """
    right, strong, swatches = set(numbers), set(totals), colours or {}
    kind = [' class="number"' if i in right else "" for i in range(len(columns))]
    head = "".join(
        f'<th scope="col"{kind[i]}>{escape(name)}</th>' for i, name in enumerate(columns)
    )
    lines = []
    for n, row in enumerate(rows):
        swatch = f'<i style="background:{swatches[n]}"></i>' if n in swatches else ""
        cells = "".join(
            f"<td{kind[i]}>{swatch if i == 0 else ''}{escape(cell)}</td>"
            for i, cell in enumerate(row)
        )
        total = ' class="total"' if n in strong else ""
        lines.append(f"<tr{total}>{cells}</tr>")
    title = f"<h3>{escape(caption)}</h3>" if caption else ""
    return (
        f'{title}<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def figure(drawing: Drawing, div_id: str) -> str:
    """A figure with its finding as heading, a legend that switches traces, and a caption."""
    name = _name(div_id)
    spec: dict[str, Any] = json.loads(drawing.figure.to_json())
    spec["layout"]["showlegend"] = False
    spec["config"] = _CONFIG | {"displayModeBar": "hover" if drawing.zoomable else False}
    height = int(spec["layout"].get("height", 400))
    data = _script_json(spec)
    return (
        f'<figure aria-labelledby="{name}-title">\n<h3 id="{name}-title">{escape(drawing.title)}'
        f"</h3>\n{_legend(spec['data'], name)}\n"
        f'{_FIGURE_MARK} id="{name}" style="height:{height}px"></div>\n'
        f'<script type="application/json" id="{name}-data">{data}</script>\n'
        f"<figcaption>{escape(drawing.caption)}</figcaption>\n</figure>"
    )


def _legend(traces: Sequence[dict[str, Any]], plot: str) -> str:
    items = []
    for trace in sorted(traces, key=lambda t: int(t.get("legendrank", 1000))):
        if trace.get("showlegend") is False or "name" not in trace:
            continue
        line = trace["type"] == "scatter"
        colour = trace["line"]["color"] if line else trace["marker"]["color"]
        style = f"background:{colour}"
        if line:
            dash = {"dash": "dashed", "dot": "dotted", "dashdot": "dashed"}
            style = f"color:{colour};border-top-style:{dash.get(trace['line']['dash'], 'solid')}"
        items.append(
            f'<li><button type="button" aria-pressed="true" data-plot="{plot}" '
            f'data-trace="{escape(trace["name"])}"><i class="{"line" if line else ""}" '
            f'style="{escape(style)}"></i>{escape(unescape(trace["name"]))}</button></li>'
        )
    return f'<ul class="legend">{"".join(items)}</ul>' if len(items) > 1 else ""


def _section(section: Section) -> str:
    name = _name(section.id)
    parts = "\n".join(part for part in section.html if part)
    return (
        f'<section id="{name}" aria-labelledby="{name}-heading">\n'
        f'<h2 id="{name}-heading">{escape(section.heading)}</h2>\n{parts}\n</section>'
    )


def _list(lines: Sequence[str]) -> str:
    return f'<ul class="plain">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def _name(text: str) -> str:
    """Text as an id or class: letters, digits and hyphens."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)


def _script_json(data: Any) -> str:
    """JSON that can't end the script element it stands in."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def asset(name: str) -> str:
    """Text of a file that pages carry inside."""
    return files("simulator.report").joinpath("assets", name).read_text(encoding="utf-8")
