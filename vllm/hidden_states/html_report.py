"""A report about a dataset as one HTML file, which opens without a network."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable, Mapping, Sequence

from vllm.hidden_states.inspection import Table
from vllm.hidden_states.plots import Draw, drawing
from vllm.hidden_states.row_statistics import TokenNorms
from vllm.utils.whole_files import write_whole

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 12px; max-width: 1100px;
  color: #1c1c1c; background: #fff; overflow-wrap: anywhere }
h1 { font-size: 1.3em } h2 { font-size: 1.1em; margin: 1.5em 0 .4em }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px }
th, td { padding: 3px 8px; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top;
  white-space: nowrap }
th { white-space: normal }
dl { margin: 0 } dt { color: #666; font-size: 13px } dd { margin: 0 0 6px }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr));
  gap: 12px } img { width: 100%; height: auto }
.tokens { font: 13px/1.9 ui-monospace, monospace; margin: 0 0 1em }
.tokens span { padding: 1px 2px; border-radius: 2px; white-space: pre-wrap; color: #000 }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(
    path: str,
    facts: Sequence[tuple[str, object]],
    tables: Mapping[str, Table],
    plots: Mapping[str, Draw],
    tokens: Sequence[TokenNorms],
    layer: tuple[int, str],
    text_of: Callable[[int], str],
) -> None:
    """Write the report. ImportError: matplotlib is missing.

    facts: names and values of the summary.
    tables: by their headings.
    layer: slot and name of the layer whose norms colour the tokens.
    text_of: returns the text of a token.
    """
    title = f"Hidden states: {html.escape(str(facts[0][1]))}"
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
        *(f"<h2>{html.escape(name)}</h2>{_table(table)}" for name, table in tables.items()),
        "<h2>Plots</h2><div class=plots>",
        *(f"<img alt={name} src=data:image/png;base64,{data}>" for name, data in _images(plots)),
        "</div>",
    ]
    if tokens:
        name = html.escape(layer[1])
        parts.append(f"<h2>Norms at tokens, layer {name}</h2><p>Red is above the median of the ")
        parts.append("sample, blue below; full colour is a factor of 8.</p>")
        parts += (_token_line(one, layer[0], text_of) for one in tokens)
    parts.append("<h2>Dataset</h2><dl>")
    parts += (
        f"<dt>{html.escape(str(name))}</dt><dd>{html.escape(str(value))}</dd>"
        for name, value in facts
    )
    parts.append("</dl></body></html>\n")
    write_whole(path, "".join(parts).encode("utf-8", "replace"))


def _table(table: Table) -> str:
    rows = (
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th"] + ["td"] * len(table), table, strict=False)
    )
    return f"<div class=wide><table><tr>{'</tr><tr>'.join(rows)}</tr></table></div>"


def _images(plots: Mapping[str, Draw]) -> list[tuple[str, str]]:
    found = []
    with drawing() as pyplot:
        for name, draw in plots.items():
            # 4 inches: at the width of a phone the text keeps its size
            figure = pyplot.figure(figsize=(4, 3.4), layout="constrained")
            draw(figure)
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=200)
            pyplot.close(figure)
            found.append((name, base64.b64encode(file.getvalue()).decode()))
    return found


def _token_line(tokens: TokenNorms, slot: int, text_of: Callable[[int], str]) -> str:
    norms = tokens.norms[:, slot]
    median = float(norms.nanmedian())
    spans = []
    for token_id, norm in zip(tokens.token_ids, norms.tolist(), strict=True):
        text = html.escape(text_of(token_id))
        spans.append(f"<span{_color(norm, median)}>{text}</span>")
    return f"<p class=tokens><b>sample {tokens.sample}</b><br>{''.join(spans)}</p>"


def _color(norm: float, median: float) -> str:
    if math.isnan(norm):
        return ""
    ratio = math.log2(norm / median) / 3 if norm > 0 and median > 0 else 0.0
    strength = round(255 * (1 - 0.7 * min(1.0, abs(ratio))))
    red, blue = (255, strength) if ratio > 0 else (strength, 255)
    return f' style="background:rgb({red},{strength},{blue})" title="{norm:.4g}"'
