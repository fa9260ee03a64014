"""Figures and tables of two papers (Frontier, arXiv 2312.12705, and HLAT, arXiv 2404.10630). They
show published numbers, numbers that the kit's planner predicts, and measured numbers.

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

UserRuns = Sequence[Run | str | Path]
"""Runs of the user that a figure shows beside the paper: opened runs, run directories, or folders
that contain run directories."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure(Appearance):
    """One figure or table of a paper: the name of the function that computes its content, and the
    texts and settings with which the content is drawn.
    """

    function: str
    """Name of the function that computes the content of the figure from a list of runs. It has the
    form `module:name`, where `module` is a module of the package kit.papers."""
    paper: str
    """Place in the paper, such as `Figure 5` or `strong scaling, 89/87 %`: the figure, table or
    section that the kit's figure reproduces or illustrates."""
    title: str
    """Title of the figure, at most one line long, for lists of figures."""
    takes: str
    """Description, in words, of the runs of the user that the figure can show. If a given run
    cannot be shown, a message quotes this description."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of `function`. The runs are passed separately, as the positional
    argument."""
    paper_panels: bool = False
    """Whether the figure has panels for curves of the paper whose numbers the kit does not know.
    Such a panel is empty, so it is drawn only if the user adds points from the paper's figure."""

    def draw(self, runs: UserRuns = (), *, points: str | Path | None = None) -> tuple[Any, Rows]:
        """Returns (figure, rows of its data table), with the runs and points of the user added. If
        the paper prints a table, the first item is a table instead of a figure.

        Logs of other trainers can be drawn after `kit import`. Runs of a local site are drawn in
        separate panels, which are marked as demo scale. The attribute `left_out` of the figure has
        a sentence for each run that the figure cannot show.

        Args:
            runs: runs of the user.
            points: CSV file of points that the user has read off the paper's figure.
                `points_template` returns an empty form of this file.

        Raises:
            ConfigError: The figure cannot be drawn from the given runs. Or points are given for a
                table, or cannot be used.
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

    def points_template(self, name: str, runs: UserRuns = ()) -> str:
        """Returns the text of a CSV file in which the user fills in points. The text has one line
        for each series (labelled curve or set of points) of this figure.

        `name` is the name of the figure, which the first line of the file quotes.
        """
        from kit.papers.points import points_template

        figure, _ = self._draw(runs, for_points=True)
        return points_template(name, figure)

    def _draw(self, runs: UserRuns, *, for_points: bool) -> tuple[Any, Rows]:
        """Returns (figure or table, rows of its data) without points of the user.

        If `for_points` is true, the caller will add points to the figure. Then panels for curves of
        the paper are drawn too, although they are still empty.
        """
        # The import is inside the function, since few commands need the modules that it loads.
        from kit.papers.panels import draw_content

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
    """Returns the names of the runs that `run` denotes. A run has one name. For a folder, these are
    the folder's name and the names of all runs in the folder.

    A figure shows `run` if the attribute `runs` of the figure contains one of these names.
    """
    # At the top of this module, this import would double the start-up time of each command.
    from kit.monitor.runs import find_runs

    if isinstance(run, Run):
        return {run.name}
    place = Path(run).resolve()
    names = {place.name}
    if place.is_dir():
        names.update(found.name for found in find_runs(place))
    return names


_DATA = read_paper_toml("figures")
FRONTIER = {name: PaperFigure(**fields) for name, fields in _DATA["frontier"].items()}
"""Figures and tables of the Frontier paper, by their names in the kit."""
HLAT = {name: PaperFigure(**fields) for name, fields in _DATA["hlat"].items()}
"""Figures and tables of the HLAT paper, by their names in the kit."""
FIGURES = FRONTIER | HLAT
"""Figures and tables of both papers, by the names that the command `kit figure` accepts."""
FRONTIER_NOT_DRAWN: dict[str, str] = _DATA["frontier_not_drawn"]
"""Figures, tables and sections of the Frontier paper that the kit does not draw. Maps their names
in the paper to the reasons."""
HLAT_NOT_DRAWN: dict[str, str] = _DATA["hlat_not_drawn"]
"""Figures, tables and sections of the HLAT paper that the kit does not draw. Maps their names in
the paper to the reasons."""


def contents(figures: dict[str, PaperFigure], not_drawn: dict[str, str]) -> Rows:
    """Returns one row for each figure and table of a paper, for a printed table of contents.

    Each row has the place in the paper, and the kit's name and title of the figure. Further rows
    name the parts of the paper that the kit does not draw, with the reason.
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
    runs: UserRuns = (),
) -> dict[str, str]:
    """Writes figures into a folder as NAME.svg, NAME.png and NAME.csv, and tables as NAME.csv.

    Creates the folder if it is missing. Replaces existing files with these names. `runs` are
    runs of the user, which the figures show too.

    Returns:
        Dict from figure name to the reason why the figure is not drawn, or to "" if it is drawn.
            Some figures show only runs of the user, so they cannot be drawn without runs.
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
    """Returns the figure or table with this name in FIGURES.

    Raises:
        ConfigError: No figure has this name.
    """
    check_known("figure", name, FIGURES)
    return FIGURES[name]
