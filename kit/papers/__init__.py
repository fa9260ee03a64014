"""Figures and tables of two papers, drawn again: what was published, what the kit models, what was
measured.

`FIGURES` names them; each is a function of run directories that returns `(figure, rows)`.
`layers.py` says how to add one.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.record import ConfigError, suggestion

if TYPE_CHECKING:
    from kit.run import Run
    from kit.show.style import Rows
    from kit.show.table import Table
    from kit.show.themed_figure import ThemedFigure


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """One figure or table of a paper: where it is drawn, and what it shows."""

    function: str
    """`module:name` below kit.papers."""
    paper: str
    """Which of the paper's figures or tables it is, or the section that it draws."""
    title: str
    """One line, for lists."""
    takes: str
    """Which runs of the reader's own it has a place for."""

    def draw(
        self, runs: "Sequence[Run | str | Path]" = (), *, points: str | Path | None = None
    ) -> "tuple[ThemedFigure | Table, Rows]":
        """Returns the figure, or what the paper prints as a table, and its rows, with points of
        these runs added.

        They may be imported logs; those of a local site are drawn apart, as demo scale. What the
        figure has no place for is named in `left_out` of what is drawn. `points` is a CSV of the
        paper's own points, which a reader of its PDF has digitised; `points_template` shows its
        form.

        Raises:
            ConfigError: the figure needs other runs; the points are of a table, or cannot be used.
        """
        if points is None:
            drawn, rows = self._function(runs)
        else:
            from kit.papers.points import add_points

            drawn, rows = self._with_axes(runs)
            rows = add_points(drawn, rows, Path(points))
        missing = [given for given in runs if not _names(given) & drawn.runs]
        drawn.left_out = tuple(
            f"{given} is not drawn. Drawn here: {self.takes}." for given in missing
        )
        return drawn, rows

    def points_template(self, name: str, runs: "Sequence[Run | str | Path]" = ()) -> str:
        """Returns a file of points to fill in, with the series of this figure, which is called
        `name` there.
        """
        from kit.papers.points import template

        return template(name, self._with_axes(runs)[0])

    @property
    def _function(self) -> "Callable[..., tuple[Any, Rows]]":
        module, name = self.function.split(":")
        return getattr(importlib.import_module(f"kit.papers.{module}"), name)

    def _with_axes(self, runs: "Sequence[Run | str | Path]") -> "tuple[Any, Rows]":
        """Returns the figure with the panels that have only points of the paper, which are left
        out without them.
        """
        drawn, rows = self._function(
            runs, **({"paper_panels": True} if self.function in PAPER_PANELS else {})
        )
        if not hasattr(drawn, "axes"):
            raise ConfigError(
                f"--points: {self.paper} is drawn as a table, which has no axes for points."
            )
        return drawn, rows


PAPER_PANELS = (
    "hlat_scores:scores_7b_figure",
    "hlat_scores:scores_70b_figure",
    "hlat_training:loss_figure",
)
"""Functions of figures with panels that would be empty without points of the paper's."""


def _names(given: "Run | str | Path") -> set[str]:
    """Returns the names under which a figure knows what was given: of a run, a report, or a
    folder and its runs.
    """
    from kit.monitor.runs import find_runs
    from kit.run import Run

    if isinstance(given, Run):
        return {given.name}
    place = Path(given).resolve()
    return {place.name} | ({run.name for run in find_runs(place)} if place.is_dir() else set())


CLUSTER = "runs of a cluster with more than two steps, whose site file has the peak"
MEMORY = "runs of a cluster with more than two steps, whose records tell their memory"
PRICED = "runs of a cluster with more than two steps, whose site file has a price"
STUDY = f"{CLUSTER}, and the study of this machine (frontier_demo)"
STEPS = "runs that have made a step"
SCORED = "runs with scores (kit eval), and reports of scores"
STUDIES = "folders with the studies of this machine (hlat_demo)"
SEARCHES = "folders with a search of this machine (frontier_demo.demo_search)"
STRONG = "two runs or more of one model on different numbers of devices, at one batch"
WEAK = f"{STRONG} a replica"


def _figures(paper: str, *figures: tuple[str, str, str, str, str]) -> dict[str, PaperFigure]:
    return {
        f"{paper}-{name}": PaperFigure(
            function=f"{paper}_{function}_figure", paper=what, title=title, takes=takes
        )
        for name, function, what, title, takes in figures
    }


FRONTIER = _figures(
    "frontier",
    ("memory", "memory:memory", "memory table", "memory by model size and convention", MEMORY),
    (
        "stage-memory",
        "memory:stage_memory",
        "authors' log",
        "memory along the pipeline, with logs",
        MEMORY,
    ),
    (
        "tensor-parallel",
        "throughput:tensor_parallel",
        "TP sweep (sec. III)",
        "throughput by tensor parallelism",
        STUDY,
    ),
    (
        "micro-batches",
        "throughput:microbatch",
        "micro-batch sweep (sec. III)",
        "throughput by micro-batches",
        STUDY,
    ),
    (
        "pipeline",
        "throughput:pipeline",
        "both stage sweeps (sec. III)",
        "throughput by pipeline stages",
        STUDY,
    ),
    (
        "observations",
        "observations:observations",
        "observations III.1-4",
        "four observations as relations",
        STUDY,
    ),
    ("roofline", "kernels:roofline", "arithmetic intensity", "roofline of a GCD", CLUSTER),
    (
        "flash-attention",
        "kernels:flash_attention",
        "flash attention",
        "what fused attention changes",
        STUDY,
    ),
    (
        "search",
        "search:search",
        "search trajectory (sec. IV)",
        "trials of the hyperparameter search",
        SEARCHES,
    ),
    (
        "sensitivity",
        "search:sensitivity",
        "SHAP values (sec. IV)",
        "what mattered in the search",
        SEARCHES,
    ),
    (
        "recipes",
        "recipes:recipes",
        "recipe table (sec. V)",
        "the recipes of 22B, 175B and 1T",
        CLUSTER,
    ),
    (
        "throughput",
        "scaling:throughput",
        "38.38/36.14/31.96 %",
        "per cent of peak, HFU and MFU",
        CLUSTER,
    ),
    (
        "weak-scaling",
        "scaling:weak_scaling",
        "weak scaling, 100 %",
        "weak scaling to 3,072 GCDs",
        WEAK,
    ),
    (
        "strong-scaling",
        "scaling:strong_scaling",
        "strong scaling, 89/87 %",
        "strong scaling to 3,072 GCDs",
        STRONG,
    ),
    (
        "cost",
        "recipes:cost",
        "120 million exaFLOP",
        "days, device-hours and GCDs for 1T on 20T tokens",
        CLUSTER,
    ),
)
FRONTIER_NOT_DRAWN = {
    "the points of all curves; numbers of figures": (
        "No stored copy of the paper's text or figures could be read: only its abstract, its"
        " authors' code and logs, and others' accounts. So sections stand where numbers should."
    ),
    "figure 5: node of Frontier": (
        "A drawing, no data; its numbers are in the site file `frontier`."
    ),
    "diagrams of the parallel strategies (sec. II)": (
        "Drawings, no data; 01_build_the_model draws the kit's own."
    ),
    "the order of SHAP values": (
        "It is remembered only; drawn are shares of the variance in the kit's search."
    ),
    "count, failures and best layout of its search": "These were not found.",
    "training loss": "The paper is a throughput study; no model was trained to convergence.",
}
"""What of the paper is not here, and why."""
HLAT = _figures(
    "hlat",
    ("models", "recipes:models", "models, released code", "the shapes of both models", "any run"),
    (
        "sequence-length",
        "quality:sequence_length",
        "Table I",
        "models and their sequence length",
        "any run",
    ),
    (
        "hyperparameters",
        "recipes:hyperparameters",
        "recipe, released code",
        "hyperparameters and layouts",
        "any run",
    ),
    (
        "learning-rate",
        "recipes:learning_rate",
        "released scheduler",
        "learning rates, clamped and rescaled",
        STEPS,
    ),
    ("data-mix", "recipes:data_mix", "Table III", "data of the last stage", "no runs"),
    ("cost", "cost:cost", "Figure 5", "cost per 4M tokens by nodes, trn1 and p4d", PRICED),
    (
        "throughput",
        "cost:throughput",
        "not in the paper",
        "AWS's benchmarks of Trainium beside the model",
        CLUSTER,
    ),
    ("quality", "quality:quality", "Table II", "quality, with your own scores", SCORED),
    ("averaging", "quality:averaging", "Table IV", "averaging the last two checkpoints", "no runs"),
    (
        "truthfulness",
        "quality:truthfulness",
        "Table V",
        "bias and truthfulness, with your own scores",
        SCORED,
    ),
    (
        "scores-7b",
        "scores:scores_7b",
        "Figure 3 (a) to (f)",
        "scores of the 7B against tokens",
        SCORED,
    ),
    (
        "scores-70b",
        "scores:scores_70b",
        "Figure 4 (a) to (f)",
        "scores of the 70B against tokens",
        SCORED,
    ),
    ("loss", "training:loss", "loss curve", "training loss, spikes marked", STEPS),
    (
        "spikes",
        "training:spikes",
        "not in the text that was read",
        "a spike, and four answers to it",
        STUDIES,
    ),
    (
        "precision",
        "training:precision",
        "precision (sec. VI)",
        "fp32, mixed and pure bf16, stochastic",
        STUDIES,
    ),
)
HLAT_NOT_DRAWN = {
    "Figures 1 and 2": (
        "The text around them could not be read, so not even what they show is certain (the loss"
        " curve is likely one of them); hlat-loss draws the curves of your own runs."
    ),
    "the points of Figures 3 and 4": (
        "Only axes and text could be read. The panels have the end points, from Tables II "
        "and IV, and the curves of your own runs."
    ),
    "the points of Figure 5": (
        "Only axes and text could be read: about 60 %, about 10 times, flat, out of memory at 4 "
        "nodes. The curves are modelled."
    ),
    "the mix of the first 1.4 trillion tokens": (
        "Its shares could not be read; the sources are named in words."
    ),
    "beta 2 of 0.99, decay of norms, pre-compilation": (
        "Section VI tells their effects in words, without numbers."
    ),
    "scores of single tasks": (
        "The text counts wins (19 and 15 of 29 against OpenLLaMA 1 and 2) without their numbers."
    ),
    "MFU, compile times, minutes of recovery": "No number of them was found.",
}
"""What of the paper is not here, and why."""
FIGURES = FRONTIER | HLAT
"""By name, as `kit figure` takes it."""


def contents(figures: dict[str, PaperFigure], not_drawn: dict[str, str]) -> "Rows":
    """Returns each figure and table of a paper with where it is here, or why it is not."""
    drawn = [
        {"of the paper": figure.paper, "here": name, "what": figure.title}
        for name, figure in figures.items()
    ]
    return [
        *drawn,
        *(
            {"of the paper": what, "here": "not drawn", "what": why}
            for what, why in not_drawn.items()
        ),
    ]


def save_all(
    figures: "dict[str, PaperFigure]",
    folder: Path,
    runs: "Sequence[Run | str | Path]" = (),
    *,
    dpi: int = 300,
) -> dict[str, str]:
    """Writes figures into a folder as NAME.svg and NAME.png, with their tables as NAME.csv; tables
    as NAME.csv only.

    The folder is made, files of these names in it are replaced; runs as in `PaperFigure.draw`.

    Returns:
        Why a figure is not drawn (some show runs only), or "", by its name.
    """
    from kit.show.style import save_figure
    from kit.show.table import Table

    problems = {}
    for name, figure in figures.items():
        try:
            drawn, rows = figure.draw(runs)
        except ConfigError as error:
            problems[name] = str(error)
            continue
        endings = ("csv",) if isinstance(drawn, Table) else ("svg", "png", "csv")
        save_figure(drawn, rows, [folder / f"{name}.{ending}" for ending in endings], dpi=dpi)
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
