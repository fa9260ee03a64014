"""Frontier: roofline of a GCD with the transformer layers of the three models, and the throughput
gain from fused attention.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.papers.frontier_demo import ATTENTION, run_hfu_percent
from kit.papers.frontier_model import (
    FACTS,
    MODELS,
    frontier_calibration,
    frontier_layouts,
    model_error,
    ratio_interval,
    recipe_plan,
    relative_rates,
    throughput_layer,
)
from kit.papers.layers import (
    WARM_UP,
    FigureLayer,
    Rows,
    Runs,
    demo_source,
    folders_with,
    measured_on_clusters,
    study_points,
)
from kit.papers.panels import FigureContent, draw_layers, panel_rows
from kit.show.theme import GREY, SLATE

TOKENS_PER_STEP = 640 * 2048
"""Number of tokens per training step of the 175B model in the authors' launch script: 640 sequences
of 2,048 tokens."""
ENLARGED_PANEL = (0.12, 0.11, 0.36, 0.42)
"""Place of the small panel in the roofline as (left, bottom, width, height), in shares of the large
panel. The small panel enlarges the points with fused attention, which are near each other."""


def layer_intensity(spec: ModelSpec, plan: Plan, *, flash_attention: bool = True) -> float:
    """Returns the arithmetic intensity of the forward pass of one transformer layer, in FLOP per
    byte of memory traffic.

    The FLOPs of matrix products and attention are counted. Bytes are the memory traffic of all
    kernels. Each matrix product reads its input and weights and writes its result once, with two
    bytes per number. Norms, residuals and the activation function read and write their tensors.
    Fused attention reads queries, keys and values, and writes its result. Without fusion, attention
    scores are written to memory. Each score then moves `score_bytes` bytes, a coefficient that was
    fitted to LUMI's runs.
    """
    h = spec.hidden_size
    f = spec.ffn_hidden_size
    s = spec.sequence_length
    t = plan.tensor_parallel
    kv = h * spec.num_kv_heads / spec.num_heads
    tokens = plan.micro_batch_size * s
    weights = spec.matmul_params_per_layer / t
    hidden = (2 + spec.gated) * f
    flops = 2 * tokens * weights + 4 * tokens * s * h / t
    products = 2 * (weights + tokens * (4 * h + (2 * h + 2 * kv + hidden) / t))
    attention = 2 * tokens * (2 * h + 2 * kv) / t
    if not flash_attention:
        attention += (
            frontier_calibration().coefficients.score_bytes * tokens * s * spec.num_heads / t
        )
    elementwise = tokens * (22 * h + (8 * h + (4 + 2 * spec.gated) * f) / t)
    return flops / (products + attention + elementwise)


def roofline_content(runs: Runs = ()) -> FigureContent:
    """Returns a figure of TFLOP/s against FLOP per byte. It shows the roofline of a GCD, and one
    point for the model of each of the paper's three recipes.
    """
    fused = _under_roof("fused attention", 2)
    written = _under_roof("scores written out", 0)
    rates = [
        fact.replace(x=str(place))
        for fact, place in zip(FACTS["throughput_tflops"], fused.x, strict=True)
    ]
    published = FigureLayer.published(rates, label="paper (fused)")
    hardware = frontier_calibration().hardware
    peak = float(hardware.peak_flops_per_s)
    memory = float(hardware.memory_bytes_per_s)
    own = measured_on_clusters(
        runs,
        x=lambda run: layer_intensity(run.spec, run.plan),
        y=lambda run: peak / 1e14 * run_hfu_percent(run),
    )
    roofs = [
        _roof("data sheet", peak, memory),
        _roof("fastest matrix product", float(hardware.attention_flops_per_s), memory),
    ]

    def name_recipes(figure: Any) -> None:
        [axis] = figure.axes
        for i, name in enumerate(MODELS):
            _note(axis, name, (written.x[i], written.low[i]), (0, -15), SLATE, ha="center")
        _note(axis, "memory, 1.6 TB/s", (58, 58e-12 * memory), (-8, 12), GREY, rotation=45)
        _draw_enlarged(axis, published, fused)

    return FigureContent(
        panels={"": [published, fused, written, *roofs, *own]},
        values={"ridge": f"{peak / memory:.0f}"},
        annotate=name_recipes,
    )


def _draw_enlarged(axis: Any, published: FigureLayer, fused: FigureLayer) -> None:
    """Draws a small panel in the roofline with the paper's points and the modelled points of fused
    attention, and a rectangle around these points in the large panel.
    """
    small = axis.inset_axes(ENLARGED_PANEL)
    draw_layers(small, [published, fused])
    left, right = 0.96 * fused.x.min(), 1.04 * fused.x.max()
    bottom, top = 0.9 * fused.low.min(), 1.2 * fused.high.max()
    small.set(xlim=(left, right), xticks=[950, 1000, 1050])
    small.set(ylim=(bottom, top), yticks=[60, 80, 100])
    small.spines[["top", "right"]].set_visible(True)
    for name, x, high in zip(MODELS, fused.x, fused.high, strict=True):
        _note(small, name, (x, high), (0, 4), SLATE, ha="center")
    frame = (left, bottom, right - left, top - bottom)
    axis.indicate_inset(frame, edgecolor=GREY, linewidth=0.8, alpha=1)


def _under_roof(label: str, code: int) -> FigureLayer:
    """Returns a figure layer (set of points) with one point for the model of each of the paper's
    three recipes. x is the arithmetic intensity in FLOP per byte. y is the modelled throughput in
    TFLOP/s, which counts recomputed FLOPs too.

    `code` is the generation of FlashAttention, or 0 if attention scores are written to memory.
    """
    recipes = [(ModelSpec.preset(preset), recipe_plan(name)) for name, preset in MODELS.items()]
    x = [layer_intensity(spec, plan, flash_attention=code > 0) for spec, plan in recipes]
    cases = [(spec, frontier_layouts(spec, [plan], flash_attention=code)) for spec, plan in recipes]
    percent = throughput_layer(label, x, cases, names=list(MODELS))
    return percent.times(float(frontier_calibration().hardware.peak_flops_per_s) / 1e14)


def flash_attention_content(runs: Runs = (), *, lengths: Sequence[int]) -> FigureContent:
    """Returns a figure of throughput in % of peak against sequence length, with fused attention and
    with attention scores written to memory.

    If `runs` contains a folder with attention times that were measured on this machine, a second
    panel shows these times.
    """
    kernels = {"FlashAttention-2": 2, "FlashAttention-1": 1, "scores written out": 0}
    modelled = [_by_length(label, code, lengths) for label, code in kernels.items()]
    own = measured_on_clusters(runs, x=lambda run: run.spec.sequence_length, y=run_hfu_percent)
    panels = {"": [*modelled, *own]}
    folders = folders_with(runs, ATTENTION)
    if folders:
        panels = {"paper's scale": panels[""], "demo scale": _timed_attention(folders[0])}
    gains = flash_gains()
    gain_texts = []
    interval_texts = []
    for gain in gains:
        gain_texts.append(f"{gain['model']} {gain['y']:+.0f} %")
        interval_texts.append(f"{gain['model']} {gain['low']:+.0f} to {gain['high']:+.0f} %")
    return FigureContent(
        panels=panels,
        values={"gains": ", ".join(gain_texts), "intervals": ", ".join(interval_texts)},
        rows=[*gains, *panel_rows(panels)],
    )


def _timed_attention(folder: Path) -> list[FigureLayer]:
    """Returns one curve (figure layer) per attention kernel: its times in ms against sequence
    length. The times were measured on this machine and stored in `folder`.
    """
    points: dict[str, list[tuple[float, ...]]] = {}
    for row in json.loads((folder / ATTENTION).read_text()):
        quantiles = 1e3 * np.quantile(row["seconds"][WARM_UP:], (0.5, 0.25, 0.75))
        points.setdefault(row["kernel"], []).append((row["sequence_length"], *quantiles))
    source = f"{demo_source([folder])}: attention of 4 heads of 64, forward and backward"
    return [
        study_points(folder, kernel, *np.transpose(found), joined=True, source=source)
        for kernel, found in points.items()
    ]


def flash_gains() -> Rows:
    """Returns one row per recipe of the paper with the modelled gain in throughput from fused
    attention, in %, and its 90 % interval.
    """
    rows = []
    for name, preset in MODELS.items():
        plans = [recipe_plan(name)] * 2
        layouts = frontier_layouts(
            ModelSpec.preset(preset), plans, flash_attention=np.array([0, 2])
        )
        y, low, high = ratio_interval(relative_rates(layouts)[:, 1])
        rows.append(
            {
                "layer": "modelled",
                "model": name,
                "gain": "fused / written out - 1, %",
                "y": float(100 * y - 100),
                "low": float(100 * low - 100),
                "high": float(100 * high - 100),
                "source": model_error(),
            }
        )
    return rows


def _by_length(label: str, code: int, lengths: Sequence[int]) -> FigureLayer:
    """Returns a curve (figure layer) of the modelled HFU of the 175B model, in %, against sequence
    length. The number of tokens per step is constant.

    `code` is the generation of FlashAttention, or 0 if attention scores are written to memory.
    """
    cases = []
    for length in lengths:
        spec = ModelSpec.preset(MODELS["175B"]).replace(sequence_length=length)
        plan = recipe_plan("175B", global_batch_size=TOKENS_PER_STEP // length)
        cases.append((spec, frontier_layouts(spec, [plan], flash_attention=code)))
    return throughput_layer(label, lengths, cases)


def _roof(label: str, flops_per_s: float, bytes_per_s: float) -> FigureLayer:
    """Returns a figure layer with one roof of the roofline: the upper bound of TFLOP/s against FLOP
    per byte. The roof is a slope up to the ridge point, then a horizontal line.

    The slope is given by the memory bandwidth `bytes_per_s`. The horizontal line is the rate of
    matrix products, `flops_per_s`.
    """
    x = np.array([10.0, flops_per_s / bytes_per_s, 10_000.0])
    y = np.minimum(flops_per_s, x * bytes_per_s) / 1e12
    error = (
        "upper bounds in TFLOP/s (data-sheet peak, fastest measured matrix product) from the site"
        " file `frontier`"
    )
    return FigureLayer.modelled(f"{label}, {flops_per_s / 1e12:.4g}", x, y, error=error)


def _note(
    axis: Any, text: str, at: Any, offset: tuple[int, int], colour: str, **style: Any
) -> None:
    """Writes a text beside a point of a panel. `at` is (x, y) of the point. `offset` is the
    distance of the text from the point, in points of 1/72 inch.
    """
    axis.annotate(text, at, xytext=offset, textcoords="offset points", color=colour, **style)
