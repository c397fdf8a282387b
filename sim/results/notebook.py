"""What a notebook shows of an experiment: its table, and its picture below."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from io import BytesIO

from umbel.sim.results.results import Results
from umbel.sim.results.shown import as_table


def as_html(results: Results) -> str:
    """One piece of HTML that needs nothing from elsewhere."""
    shown, picture = as_table(results), BytesIO()
    results.plot().savefig(picture, format="png")
    lines = [_line("th", shown.header), *(_line("td", row) for row in shown.rows)]
    image = b64encode(picture.getvalue()).decode()
    return (
        f"<table><caption>{escape(results.name)}</caption>{''.join(lines)}</table>"
        f'<img alt="{escape(results.name)}: accuracy over rounds, uploads and virtual time" style="max-width: 100%" '
        f'src="data:image/png;base64,{image}">'
    )


def _line(kind: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"
