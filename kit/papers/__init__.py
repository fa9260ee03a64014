"""Figures and tables of two papers, reproduced from published numbers, numbers that the kit models,
and measured numbers.

`FIGURES` maps names to figures. `data/figures.toml` has the texts and settings of each figure. It
also names the function that computes the figure's content from run directories. The docstring of
`layers.py` says how to add a figure.
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
"""The user's own runs: run directories, or folders of them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure(Appearance):
    """One figure or table of a paper: the function that computes its content, and its
    appearance.
    """

    function: str
    """Function that returns the content for a list of runs, as `module:name` below kit.papers."""
    paper: str
    """Number of the figure or table in the paper, or the section of the paper that it shows."""
    title: str
    """Title of one line, for lists of figures."""
    takes: str
    """Kind of the user's own runs that the figure can show, for the message about other runs."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the function besides the runs."""
    paper_panels: bool = False
    """Whether the figure has panels that stay empty until points from the paper are added."""

    def draw(self, runs: Given = (), *, points: str | Path | None = None) -> tuple[Any, Rows]:
        """Returns (figure, or a table if the paper prints one; its rows), with points of the user's
        runs added.

        Runs may be imported logs. Runs of a local site are drawn in panels of their own, marked as
        demo scale. The attribute `left_out` of the figure names each run that the figure has no
        place for.

        Args:
            runs: the user's own runs.
            points: CSV of points that the user has read off the paper's figure. `points_template`
                returns an empty form of this file.

        Raises:
            ConfigError: The figure needs other runs. Or points are given for a table, or cannot be
                used.
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
        """Returns the text of a CSV file of points to fill in, with the series of this figure.

        `name` is the name of the figure in that file.
        """
        from kit.papers.points import template

        figure, _ = self._draw(runs, for_points=True)
        return template(name, figure)

    def _draw(self, runs: Given, *, for_points: bool) -> tuple[Any, Rows]:
        """Returns (figure or table, its rows).

        If points will be added, the panels of the paper that are empty without points are drawn
        too.
        """
        from kit.papers.panels import draw_content  # Loads modules that few commands need.

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
    """Returns the names that a figure's `runs` has for a run, a report file, or a folder and the
    runs in it.
    """
    from kit.monitor.runs import find_runs  # This import doubles the start-up time of a command.

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
"""Reason why a part of the Frontier paper is not drawn, by the part."""
HLAT_NOT_DRAWN: dict[str, str] = _DATA["hlat_not_drawn"]
"""Reason why a part of the HLAT paper is not drawn, by the part."""


def contents(figures: dict[str, PaperFigure], not_drawn: dict[str, str]) -> Rows:
    """Returns rows that list the figures and tables of a paper.

    Each row has the number in the paper and the kit's name and title of the figure. Parts that are
    not drawn have a row with the reason.
    """
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
    """Writes figures into a folder as NAME.svg, NAME.png and NAME.csv, and tables as NAME.csv.

    Creates the folder if it is missing. Replaces files with these names. `runs` is explained in
    `PaperFigure.draw`.

    Returns:
        The reason why a figure is not drawn, or "" if it is drawn, by the figure's name. Some
        figures show runs only, so they are not drawn without runs.
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
    """Returns the figure of FIGURES with this name.

    Raises:
        ConfigError: No figure has this name.
    """
    check_known("figure", name, FIGURES)
    return FIGURES[name]
