"""A page as one HTML file that works offline, light or dark as the reader's system is: plots (svg.py), tables, words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["document", "figures", "grid"]

STYLE = """
:root{--ink:#1b1e23;--paper:#fff;--grid:#dfe3e8;--bad:#c9242b;--dim:#667}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--paper:#16181c;--grid:#33383f;--bad:#ff6b6b;--dim:#9aa}}
body{font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:2rem auto;max-width:1200px;padding:0 1rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{border-bottom:1px solid var(--grid);padding:.25rem .6rem;text-align:right}th:first-child,td:first-child{text-align:left}
.bad{color:var(--bad);font-weight:600}.dim{color:var(--dim);white-space:pre-line}svg{font:11px system-ui,sans-serif;max-width:100%}
.plots{display:flex;flex-wrap:wrap;gap:1.5rem}figure{margin:0}figcaption{font-weight:600}
"""


def document(title: str, body: str) -> str:
    """The whole file."""
    return (f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
            f"<style>{STYLE}</style>{body}</html>\n")


def grid(head: Sequence[str], body: Sequence[Sequence[tuple[str, bool]]]) -> str:
    """A table whose cells may be bad, which is red."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    rows = "".join("<tr>" + "".join(f"<td{' class=bad' if bad else ''}>{escape(text)}</td>" for text, bad in row) + "</tr>"
                   for row in body)
    return f"<div class=wide><table><tr>{top}</tr>{rows}</table></div>"


def figures(title: str, plots: Mapping[str, str]) -> str:
    shown = "".join(f"<figure><figcaption>{escape(name)}</figcaption>{plot}</figure>" for name, plot in plots.items() if plot)
    return f"<h2>{escape(title)}</h2><div class=plots>{shown}</div>" if shown else ""
