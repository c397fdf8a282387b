"""How the parts of a picture look: quiet lines, the words in ink."""

from matplotlib.axes import Axes

INK, FAINT, GRID = "#22313f", "#66737f", "#e6eaee"


def dress(axes: Axes, title: str, x_label: str, *, grid: bool = True) -> None:
    """Title, the x axis's words, and what frames it. `grid`: lines across, behind what is drawn."""
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=9)
    axes.set_xlabel(x_label, color=FAINT, fontsize=9.5)
    axes.tick_params(colors=FAINT, labelcolor=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    if grid:
        axes.grid(axis="y", color=GRID, lw=0.8)
        axes.set_axisbelow(True)


def as_percent(share: float, _: int | None = None) -> str:
    """A tick's words, of as many places as it takes: `12.5%`."""
    return f"{100 * share:.4g}%"
