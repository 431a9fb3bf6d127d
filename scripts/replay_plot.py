"""The trade-off of cache-aware routing as a picture: bytes per token against what it changes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot(file: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write a PNG. rows: of replay_routing. Raises ValueError where matplotlib is missing or nothing is to be shown."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'mlx-moe-stream[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from replay_routing import as_dict

    points = [as_dict(row) for row in rows if row["result"].windows.tokens]
    if not points:
        raise ValueError("--plot: the recording holds no window, so there is nothing to show")
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.5), sharey=True, layout="constrained")
    scale, unit = (1e6, "MB") if max(p["window_bytes_per_token"] for p in points) > 2e6 else (1e3, "kB")
    for axis, key, label in zip(
        axes,
        ("substituted", "relative_error"),
        ("substituted picks, %", "routed relative squared error, %"),
        strict=True,
    ):
        _draw(axis, points, key, scale)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"{unit} read from the SSD per token of windows")
    axes[0].set_ylim(bottom=0)
    axes[1].legend(fontsize=8, loc="lower left")
    figure.suptitle("What is read against what cache-aware routing changes (points: bonus)")
    path = Path(file)
    part = path.with_name(path.name + ".part")
    try:
        figure.savefig(part, dpi=130, format="png")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
        pyplot.close(figure)


def _draw(axis: Any, points: Sequence[dict[str, Any]], key: str, scale: float) -> None:
    """Exact rules as levels, settings of moce as lines over the bonus, one for each cap and number of slots."""
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for point in points:
        height = point["window_bytes_per_token"] / scale
        name, slots = point["rule"], point["slots"]
        if name.startswith("moce"):
            bonus, keep, cap = name.removeprefix("moce ").split(" / ")
            lines.setdefault(f"{slots} slots, keep {keep}, cap {cap}", []).append((100 * point[key], height, bonus))
        elif name in ("lru", "belady"):
            style = "--" if name == "lru" else ":"
            axis.axhline(height, linestyle=style, color="0.4", linewidth=1)
            axis.annotate(f"{name}, {slots} slots", (0.98, height), xycoords=("axes fraction", "data"), fontsize=8,
                          ha="right", va="bottom", color="0.3")  # fmt: skip
    offsets = ((5, 5), (5, -12), (-24, -12))
    for i, (label, found) in enumerate(lines.items()):
        found.sort()
        axis.plot([x for x, _, _ in found], [y for _, y, _ in found], marker="o", label=label)
        for x, y, bonus in found:
            axis.annotate(bonus, (x, y), textcoords="offset points", xytext=offsets[i % 3], fontsize=8)
