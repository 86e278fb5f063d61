"""The success curve: inline SVG for the report, and the same picture as a PNG file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from cuajax.viewer.text import told

Points = Sequence[tuple[float, float]]  # (update, success in [0,1]), left to right
Series = Mapping[str, Points]  # name -> points; the first is the one that counts

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 260, 44, 12, 12, 34  # of the drawing, in its own units
_COLOURS = ("#2563eb", "#94a3b8", "#d97706", "#059669")
_INK, _FAINT = "#334155", "#e2e8f0"


def _ticks(low: float, high: float) -> list[float]:
    """About six round numbers from low to high."""
    rough = max(high - low, 1e-9) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = -(-low // step) * step
    return [first + step * i for i in range(int((high - first) / step + 1e-9) + 1)]


def svg(series: Series, *, label: str = "update") -> str:
    """An `<svg>` element styled by the report's sheet (classes `line0`..., `grid`, `tick`); "" without points."""
    drawn = {name: points for name, points in series.items() if points}
    if not drawn:
        return ""
    xs = [x for points in drawn.values() for x, _ in points]
    low, high = min(xs), max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)
        return _LEFT + across, _TOP + (1 - min(max(y, 0.0), 1.0)) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="success by {told(label)}">']
    for level in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = place(low, level)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{level:.0%}</text>')
    for tick in _ticks(low, high):
        x, _ = place(tick, 0)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{tick:g}</text>')
    for rank, (name, points) in reversed(list(enumerate(drawn.items()))):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline class="line{min(rank, 3)}" points="{path}"><title>{told(name)}</title></polyline>')
        x, y = place(*points[-1])
        parts.append(f'<circle class="dot{min(rank, 3)}" cx="{x:.1f}" cy="{y:.1f}" r="{3.5 if rank == 0 else 2}"/>')
    names = "".join(f'<span class="key{min(rank, 3)}">{told(name)}</span>' for rank, name in enumerate(drawn))
    return "".join([*parts, "</svg>", f'<p class="keys">{names}<span class="axis">by {told(label)}</span></p>'])


def png(series: Series, path: str | os.PathLike[str], *, title: str = "", label: str = "update") -> None:
    """Writes the curve as a PNG of 1600 x 800 pixels. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    axes = figure.subplots()
    for rank, (name, points) in reversed(list(enumerate(series.items()))):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        width = 2.2 if rank == 0 else 1.2
        axes.plot(xs, ys, color=_COLOURS[min(rank, 3)], linewidth=width, label=name, solid_capstyle="round")
        axes.plot(xs[-1:], ys[-1:], "o", color=_COLOURS[min(rank, 3)], markersize=2.5 * width)
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.tick_params(length=0, colors=_INK, labelsize=9)
    axes.set_xlabel(label, color=_INK)
    axes.set_ylabel("success", color=_INK)
    axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold")
    for side in axes.spines.values():
        side.set_visible(False)
    if len(series) > 1:
        lines, names = axes.get_legend_handles_labels()
        axes.legend(lines[::-1], names[::-1], frameon=False, labelcolor=_INK, fontsize=9, loc="lower right")
    figure.savefig(path, format="png")
