"""Figures and tables of two papers, drawn again: what was published, what the kit models, what was measured.

`FIGURES` names them; each is a function of run directories that returns `(figure, rows)`. `layers.py` says how to add
one.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.record import ConfigError, suggestion

if TYPE_CHECKING:
    from kit.run import Run
    from kit.style import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """One figure or table of a paper: where it is drawn, and what it shows."""

    function: str
    """`module:name` below kit.papers."""
    paper: str
    """Which of the paper's figures or tables it is, or the section that it draws."""
    title: str
    """One line, for lists."""

    def draw(self, runs: "Sequence[Run | str | Path]" = ()) -> "tuple[Any, Rows]":
        """Returns the figure and its table, with the points of these run directories added.

        Args:
            runs: your own, or imported logs; those of a local site are drawn apart, as demo scale.
        """
        module, name = self.function.split(":")
        function: Callable[..., tuple[Any, Rows]] = getattr(importlib.import_module(f"kit.papers.{module}"), name)
        return function(runs)


def _figures(paper: str, *figures: tuple[str, str, str, str]) -> dict[str, PaperFigure]:
    return {
        f"{paper}-{name}": PaperFigure(function=f"{paper}_{function}_figure", paper=what, title=title)
        for name, function, what, title in figures
    }


FRONTIER = _figures(
    "frontier",
    ("memory", "memory:memory", "memory table", "memory by model size and convention"),
    ("stage-memory", "memory:stage_memory", "authors' log", "memory along the pipeline: logs of Frontier and LUMI"),
    ("tensor-parallel", "throughput:tensor_parallel", "TP sweep (sec. III)", "throughput against tensor parallelism"),
    ("micro-batches", "throughput:microbatch", "micro-batch sweep (sec. III)", "throughput by micro-batches"),
    ("pipeline", "throughput:pipeline", "both stage sweeps (sec. III)", "throughput by stages; batch, or m/p, fixed"),
    ("observations", "observations:observations", "observations III.1-4", "the four observations as relations"),
    ("roofline", "kernels:roofline", "arithmetic intensity", "roofline of a GCD"),
    ("flash-attention", "kernels:flash_attention", "flash attention", "what fused attention changes"),
    ("search", "search:search", "search trajectory (sec. IV)", "trials of the hyperparameter search"),
    ("sensitivity", "search:sensitivity", "SHAP values (sec. IV)", "what mattered in the search"),
    ("recipes", "recipes:recipes", "recipe table (sec. V)", "the recipes of 22B, 175B and 1T"),
    ("throughput", "scaling:throughput", "38.38/36.14/31.96 %", "22B, 175B and 1T in per cent of peak, HFU and MFU"),
    ("weak-scaling", "scaling:weak_scaling", "weak scaling, 100 %", "weak scaling to 1,024 and 3,072 GCDs"),
    ("strong-scaling", "scaling:strong_scaling", "strong scaling, 89/87 %", "strong scaling to 1,024 and 3,072 GCDs"),
    ("cost", "recipes:cost", "120 million exaFLOP", "time, device-hours and GCDs for 1T parameters on 20T tokens"),
)
FRONTIER_NOT_DRAWN = {
    "the points of all curves; numbers of figures": "No stored copy of the paper's text or figures could be read: only "
    "its abstract, its authors' code and logs, and others' accounts. So sections stand where numbers should.",
    "figure 5: node of Frontier": "A drawing, no data; its numbers are in the site file `frontier`.",
    "diagrams of the parallel strategies (sec. II)": "Drawings, no data; 01_build_the_model draws the kit's own.",
    "the order of SHAP values": "It is remembered only; the one drawn is that of the kit's search.",
    "count, failures and best layout of its search": "These were not found.",
    "training loss": "The paper is a throughput study; no model was trained to convergence.",
}
"""What of the paper is not here, and why."""
HLAT = _figures(
    "hlat",
    ("models", "recipes:models", "models, released code", "the shapes of both models"),
    ("sequence-length", "quality:sequence_length", "Table I", "models and their sequence length"),
    ("hyperparameters", "recipes:hyperparameters", "recipe, released code", "hyperparameters and layouts"),
    ("learning-rate", "recipes:learning_rate", "released scheduler", "learning-rate schedules, clamped and rescaled"),
    ("data-mix", "recipes:data_mix", "Table III", "data of the last stage"),
    ("cost", "cost:cost", "Figure 5", "cost per 4M tokens against nodes, trn1 and p4d"),
    ("throughput", "cost:throughput", "not in the paper", "AWS's benchmarks of Trainium beside the model"),
    ("quality", "quality:quality", "Table II", "quality, with your own scores"),
    ("averaging", "quality:averaging", "Table IV", "averaging the last two checkpoints"),
    ("truthfulness", "quality:truthfulness", "Table V", "bias and truthfulness, with your own scores"),
    ("scores-7b", "scores:scores_7b", "Figure 3 (a) to (f)", "scores of the 7B against tokens"),
    ("scores-70b", "scores:scores_70b", "Figure 4 (a) to (f)", "scores of the 70B against tokens"),
    ("loss", "training:loss", "loss curve", "training loss, spikes marked"),
    ("spikes", "training:spikes", "not in the text that was read", "a spike, and what to do about it, at demo scale"),
    ("precision", "training:precision", "precision (sec. VI)", "fp32, mixed and pure bf16, stochastic rounding"),
)
HLAT_NOT_DRAWN = {
    "Figures 1 and 2": "The text around them could not be read, so not even what they show is certain (the loss curve "
    "is likely one of them); hlat-loss draws the curves of your own runs.",
    "the points of Figures 3 and 4": "Only axes and text could be read. The panels have the end points, from Tables II "
    "and IV, and the curves of your own runs.",
    "the points of Figure 5": "Only axes and text could be read: about 60 %, about 10 times, flat, out of memory at 4 "
    "nodes. The curves are modelled.",
    "the mix of the first 1.4 trillion tokens": "Its shares could not be read; the sources are named in words.",
    "beta 2 of 0.99, decay of norms, pre-compilation": "Section VI tells their effects in words, without numbers.",
    "scores of single tasks": "The text counts wins (19 and 15 of 29 against OpenLLaMA 1 and 2) without their numbers.",
    "MFU, compile times, minutes of recovery": "No number of them was found.",
}
"""What of the paper is not here, and why."""
FIGURES = FRONTIER | HLAT
"""By name, as `kit figure` takes it."""


def contents(figures: dict[str, PaperFigure], not_drawn: dict[str, str]) -> "Rows":
    """Returns each figure and table of a paper with where it is here, or why it is not."""
    drawn = [{"of the paper": figure.paper, "here": name, "what": figure.title} for name, figure in figures.items()]
    return [*drawn, *({"of the paper": what, "here": "not drawn", "what": why} for what, why in not_drawn.items())]


def save_all(
    figures: "dict[str, PaperFigure]", folder: Path, runs: "Sequence[Run | str | Path]" = (), *, dpi: int = 300
) -> dict[str, str]:
    """Writes figures into a folder as NAME.svg and NAME.png, with their tables as NAME.csv.

    Args:
        figures: all or some of `FIGURES`.
        folder: is made; files of these names in it are replaced.
        runs: as in `PaperFigure.draw`.
        dpi: of the PNG.

    Returns:
        Why a figure is not drawn (some show runs only), or "", by its name.
    """
    from kit.style import save_figure

    problems = {}
    for name, figure in figures.items():
        try:
            drawn, rows = figure.draw(runs)
        except ConfigError as error:
            problems[name] = str(error)
            continue
        save_figure(drawn, rows, [folder / f"{name}.{ending}" for ending in ("svg", "png", "csv")], dpi=dpi)
        problems[name] = ""
    return problems


def paper_figure(name: str) -> PaperFigure:
    """Returns one of FIGURES.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in FIGURES:
        raise ConfigError(f"figure: {name!r} is unknown. {suggestion(name, FIGURES)}")
    return FIGURES[name]
