"""Curves of your own runs over their steps, for figures beside those of points: a line a run."""

from typing import Any

import numpy as np

from kit.papers.layers import Layer, Runs, demo_source, opened, scale_of
from kit.papers.panels import COLOURS, DEMO_COLOURS, mark_demo_scale
from kit.show.style import short


def curves(runs: Runs, column: str) -> list[Layer]:
    """Returns one column of the metrics of each run against millions of tokens, a layer a run.

    Args:
        runs: run directories; those without a step are left out.
        column: of `Metrics`.
    """
    layers = []
    for run in opened(runs):
        metrics = run.metrics()
        if len(metrics):
            empty, scale = np.full(len(metrics), np.nan), scale_of(run)
            source = "run directories given to the figure"
            if scale == "demo":
                source = demo_source([run.directory.parent])
            layers.append(
                Layer(kind="measured", label=run.name, x=metrics.total_tokens / 1e6, y=metrics[column],
                      low=empty, high=empty, source=source, scale=scale, joined=True, runs=(run.name,))
            )  # fmt: skip
    return layers


def draw_curves(axis: Any, layers: list[Layer], **style: Any) -> None:
    """Draws measured curves of many points, a colour each, and marks demo scale."""
    for number, layer in enumerate(layers):
        colours = DEMO_COLOURS if layer.scale == "demo" else COLOURS
        axis.plot(layer.x, layer.y, color=colours[number % len(colours)], label=short(layer.label), **style)
    if any(layer.scale == "demo" for layer in layers):
        mark_demo_scale(axis)
