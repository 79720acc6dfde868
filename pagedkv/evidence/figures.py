"""One look for every figure, readable in grey, and SVG files that are the same bytes whenever the numbers are."""

from __future__ import annotations

import io
from pathlib import Path

# Okabe-Ito colours in an order whose luminance alternates; line styles and markers repeat the distinction in grey.
COLORS = ("#0072B2", "#E69F00", "#000000", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#999999")
LINES = ("-", "--", ":", "-.", "-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "oo", "++")

_STYLE = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "figure.constrained_layout.use": True,
    "figure.figsize": (7.0, 4.0),
    "font.size": 9,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "lines.markersize": 4,
    "path.simplify": True,
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text: small, searchable, and free of the machine's fonts
    "svg.hashsalt": "pagedkv",
}


def use_style() -> None:
    """Make the style matplotlib's default for this process."""
    import matplotlib
    from cycler import cycler

    matplotlib.rcParams.update(_STYLE)
    matplotlib.rcParams["axes.prop_cycle"] = cycler(color=COLORS) + cycler(linestyle=LINES) + cycler(marker=MARKERS)


def bar_style(index: int) -> dict:
    """Keyword arguments for the `index`-th group of bars: colour, hatch and outline."""
    return {"color": COLORS[index % len(COLORS)], "hatch": HATCHES[index % len(HATCHES)], "edgecolor": "white", "linewidth": 0.5}


def svg(figure) -> str:
    """A matplotlib figure as SVG text without date or version. Raises `ValueError` where no axis is labelled."""
    import matplotlib

    axes = [a for a in figure.axes if a.get_visible()]
    for labelled, attribute, kind in ((figure.get_supxlabel(), "get_xlabel", "x"), (figure.get_supylabel(), "get_ylabel", "y")):
        if not labelled and not any(getattr(a, attribute)() for a in axes):
            raise ValueError(f"figure: no {kind} axis carries a label; say what is drawn, with its unit")
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": _STYLE["svg.hashsalt"], "svg.fonttype": _STYLE["svg.fonttype"]}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def save(figure, path: str | Path) -> None:
    """Write a figure as SVG, whole or not at all."""
    from pagedkv.evidence.record import write_text

    write_text(path, svg(figure))
