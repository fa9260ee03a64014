"""Figures and tables of two papers, drawn again: what was published, what the kit models, what was
measured.

`FIGURES` names them. `data/figures.toml` has the texts and settings of each, and names a function
of run directories that returns its content. `layers.py` says how to add one.
"""

import dataclasses
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.errors import ConfigError, check_known
from kit.papers.appearance import Appearance
from kit.papers.facts import read_paper_toml
from kit.run import Run
from kit.show.style import Rows, save_figure

Given = Sequence[Run | str | Path]
"""Runs of the reader's own: run directories, or folders of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure(Appearance):
    """One figure or table of a paper: the function of its content, and how it looks."""

    function: str
    """`module:name`, below kit.papers, of the function that returns the content for some runs."""
    paper: str
    """Number of the paper's figure or table, or the section that it draws."""
    title: str
    """One line, for lists."""
    takes: str
    """Which of the reader's own runs it has a place for."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of the function besides the runs."""
    paper_panels: bool = False
    """Whether it has panels that are empty without points of the paper's."""

    def draw(self, runs: Given = (), *, points: str | Path | None = None) -> tuple[Any, Rows]:
        """Returns the figure, or what the paper prints as a table, and its rows, with points of
        these runs added.

        They may be imported logs; those of a local site are drawn apart, as demo scale. What the
        figure has no place for is named in `left_out` of what is drawn. `points` is a CSV of the
        paper's own points, which a reader of its PDF has digitised; `points_template` shows its
        form.

        Raises:
            ConfigError: the figure needs other runs; the points are of a table, or cannot be used.
        """
        drawn, rows = self._draw(runs, for_points=points is not None)
        if points is not None:
            from kit.papers.points import add_points

            rows = add_points(drawn, rows, Path(points))
        drawn.left_out = tuple(
            f"{run} is not drawn. Drawn here: {self.takes}."
            for run in runs
            if not _names_of(run) & drawn.runs
        )
        return drawn, rows

    def points_template(self, name: str, runs: Given = ()) -> str:
        """Returns a file of points to fill in, with the series of this figure, which is called
        `name` there.
        """
        from kit.papers.points import template

        figure, _ = self._draw(runs, for_points=True)
        return template(name, figure)

    def _draw(self, runs: Given, *, for_points: bool) -> tuple[Any, Rows]:
        """Returns the figure and its rows.

        For points it has also those panels of the paper that are empty without them.
        """
        from kit.papers.panels import draw_content  # imports what few commands need

        function = pkgutil.resolve_name(f"kit.papers.{self.function}")
        arguments = dict(self.arguments)
        if for_points and self.paper_panels:
            arguments["paper_panels"] = True
        drawn, rows = draw_content(self, function(runs, **arguments))
        if for_points and not hasattr(drawn, "axes"):
            raise ConfigError(
                f"--points: {self.paper} is drawn as a table, which has no axes for points."
            )
        return drawn, rows


def _names_of(run: Run | str | Path) -> set[str]:
    """Returns the names under which a figure knows a run, a report, or a folder and its runs."""
    from kit.monitor.runs import find_runs  # half of what a command would take to start

    if isinstance(run, Run):
        return {run.name}
    place = Path(run).resolve()
    names = {place.name}
    if place.is_dir():
        names.update(found.name for found in find_runs(place))
    return names


_DATA = read_paper_toml("figures")
FRONTIER = {name: PaperFigure(**fields) for name, fields in _DATA["frontier"].items()}
"""Figures and tables of the Frontier paper, by name."""
HLAT = {name: PaperFigure(**fields) for name, fields in _DATA["hlat"].items()}
"""Figures and tables of the HLAT paper, by name."""
FIGURES = FRONTIER | HLAT
"""Figures and tables of both papers, by the name that `kit figure` takes."""
FRONTIER_NOT_DRAWN: dict[str, str] = _DATA["frontier_not_drawn"]
"""Parts of the Frontier paper that are not drawn, with the reason."""
HLAT_NOT_DRAWN: dict[str, str] = _DATA["hlat_not_drawn"]
"""Parts of the HLAT paper that are not drawn, with the reason."""


def contents(figures: dict[str, PaperFigure], not_drawn: dict[str, str]) -> Rows:
    """Returns each figure and table of a paper with where it is here, or why it is not."""
    rows = [
        {"of the paper": figure.paper, "here": name, "what": figure.title}
        for name, figure in figures.items()
    ]
    for part, reason in not_drawn.items():
        rows.append({"of the paper": part, "here": "not drawn", "what": reason})
    return rows


def save_all(
    figures: dict[str, PaperFigure],
    folder: Path,
    runs: Given = (),
) -> dict[str, str]:
    """Writes figures into a folder as NAME.svg and NAME.png, with their tables as NAME.csv; tables
    as NAME.csv only.

    The folder is made, files of these names in it are replaced; runs as in `PaperFigure.draw`.

    Returns:
        Why a figure is not drawn (some show runs only), or "", by its name.
    """
    problems = {}
    for name, figure in figures.items():
        try:
            drawn, rows = figure.draw(runs)
        except ConfigError as error:
            problems[name] = str(error)
            continue
        endings = ["csv"]
        if hasattr(drawn, "axes"):
            endings += ["svg", "png"]
        save_figure(drawn, rows, [folder / f"{name}.{ending}" for ending in endings])
        problems[name] = ""
    return problems


def paper_figure(name: str) -> PaperFigure:
    """Returns one of FIGURES.

    Raises:
        ConfigError: there is none of this name.
    """
    check_known("figure", name, FIGURES)
    return FIGURES[name]
