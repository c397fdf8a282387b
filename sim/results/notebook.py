"""Shows what changes in a notebook's cell, with IPython alone: `ipywidgets` is not needed."""

import importlib
import time
from collections.abc import Callable
from io import StringIO
from typing import Any

from rich.console import Console, RenderableType

_EVERY_S = 0.1  # the browser would be busy with more
_WIDTH = 100  # characters
_PRE = '<pre style="line-height: normal">{code}</pre>'


class NotebookCell:
    """A place in the output of the current cell, whose content is replaced. `display`: IPython's."""

    def __init__(self, display: Callable[..., Any] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        ipython = importlib.import_module("IPython.display") if display is None else None
        self._display: Callable[..., Any] = display or getattr(ipython, "display")  # noqa: B009 - it has no types
        self._clock, self._shown_at = clock, -_EVERY_S
        self._handle: Any = None

    def show(self, content: RenderableType, *, at_once: bool = False) -> None:
        """Replace the content, ten times a second at most unless it must be `at_once`."""
        now = self._clock()
        if not at_once and now - self._shown_at < _EVERY_S:
            return
        self._shown_at, bundle = now, bundle_of(content)
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def bundle_of(content: RenderableType) -> dict[str, str]:
    """The content as text and as HTML, by media type, as notebooks take it."""
    console = Console(file=StringIO(), record=True, width=_WIDTH, force_jupyter=False, force_terminal=True)
    console.print(content)
    html = console.export_html(inline_styles=True, code_format=_PRE, clear=False)
    return {"text/plain": console.export_text().rstrip(), "text/html": html}
