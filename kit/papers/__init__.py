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
    from kit.pictures import Rows
    from kit.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """One figure or table of a paper: where it is drawn, and what it shows."""

    function: str
    """`module:name` below kit.papers."""
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


FRONTIER = {
    f"frontier-{name}": PaperFigure(function=f"frontier_{function}_figure", title=title)
    for name, function, title in (
        ("memory", "memory:memory", "memory by model size and convention"),
        ("stage-memory", "memory:stage_memory", "memory along the pipeline against the logs of Frontier and LUMI"),
        ("tensor-parallel", "throughput:tensor_parallel", "throughput against tensor parallelism"),
        ("micro-batches", "throughput:microbatch", "throughput against micro-batches: the bubble"),
        ("pipeline", "throughput:pipeline", "throughput against stages: batch fixed, micro-batches per stage fixed"),
        ("observations", "observations:observations", "the four observations as relations"),
        ("roofline", "kernels:roofline", "roofline of a GCD"),
        ("flash-attention", "kernels:flash_attention", "what fused attention changes"),
        ("search", "search:search", "trials of the hyperparameter search"),
        ("sensitivity", "search:sensitivity", "what mattered in the search"),
        ("recipes", "recipes:recipes", "the recipes of 22B, 175B and 1T"),
        ("throughput", "scaling:throughput", "22B, 175B and 1T in per cent of peak, HFU and MFU"),
        ("weak-scaling", "scaling:weak_scaling", "weak scaling to 1,024 and 3,072 GCDs"),
        ("strong-scaling", "scaling:strong_scaling", "strong scaling to 1,024 and 3,072 GCDs"),
        ("cost", "recipes:cost", "time, device-hours and GCDs for 1T parameters on 20T tokens"),
    )
}
FRONTIER_NOT_DRAWN = {
    "the points of the paper's curves": "No stored copy of the paper's text or figures could be read: only its "
    "abstract, its authors' code and logs, and others' accounts.",
    "node diagram (figure 5)": "A drawing of Frontier's node, no data; its numbers are in the site file `frontier`.",
    "diagrams of the parallel strategies (section II)": "Drawings, no data; 01_build_the_model draws the kit's own.",
    "SHAP ranking of the paper's trials": "The order is remembered only; the one drawn is that of the kit's search.",
    "trials and failures of the paper's own search": "Their numbers, values and best layout were not found.",
    "training loss": "The paper is a throughput study; no model was trained to convergence.",
}
"""Figures and tables of the paper that are not here, and why."""
HLAT = {
    f"hlat-{name}": PaperFigure(function=f"hlat_{function}_figure", title=title)
    for name, function, title in (
        ("models", "recipes:models", "the shapes of both models"),
        ("sequence-length", "quality:sequence_length", "Table I: models and their sequence length"),
        ("hyperparameters", "recipes:hyperparameters", "hyperparameters and layouts"),
        ("learning-rate", "recipes:learning_rate", "learning-rate schedules, clamped and rescaled"),
        ("data-mix", "recipes:data_mix", "Table III: data of the last stage"),
        ("cost", "cost:cost", "Figure 5: cost per 4M tokens against nodes, trn1 and p4d"),
        ("throughput", "cost:throughput", "AWS's benchmarks of Trainium beside the model"),
        ("quality", "quality:quality", "Table II: quality, with your own scores"),
        ("averaging", "quality:averaging", "Table IV: averaging the last two checkpoints"),
        ("truthfulness", "quality:truthfulness", "Table V: bias and truthfulness, with your own scores"),
        ("scores-7b", "scores:scores_7b", "Figure 3: scores of the 7B against tokens"),
        ("scores-70b", "scores:scores_70b", "Figure 4: scores of the 70B against tokens"),
        ("loss", "training:loss", "training loss, spikes marked"),
        ("spikes", "training:spikes", "a spike, and what to do about it, at demo scale"),
        ("precision", "training:precision", "fp32, mixed and pure bf16, stochastic rounding, at demo scale"),
    )
}
HLAT_NOT_DRAWN = {
    "figures 1 and 2": "The text around them could not be read, so not even what they show is certain (the loss curve "
    "is likely one of them); hlat-loss draws the curves of your own runs.",
    "the points of figures 3 and 4": "Only axes and text could be read. The panels have the end points, from Tables II "
    "and IV, and the curves of your own runs.",
    "the points of figure 5": "Only axes and text could be read: about 60 %, about 10 times, flat, out of memory at 4 "
    "nodes. The curves are modelled.",
    "the mix of the first 1.4 trillion tokens": "Its shares could not be read; the sources are named in words.",
    "MFU, compile times, minutes of recovery": "No number of them was found.",
}
"""Figures and tables of the paper that are not here, and why."""
FIGURES = FRONTIER | HLAT
"""By name, as `kit figure` takes it."""


def paper_figure(name: str) -> PaperFigure:
    """Returns one of FIGURES.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in FIGURES:
        raise ConfigError(f"figure: {name!r} is unknown. {suggestion(name, FIGURES)}")
    return FIGURES[name]
