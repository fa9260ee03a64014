"""Figures and tables of two papers, drawn again: what was published, what the kit models, what was
measured.

`FIGURES` names them; each is a function of run directories that returns `(figure, rows)`.
`layers.py` says how to add one.
"""

import dataclasses
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.errors import ConfigError, check_known
from kit.papers.facts import read_toml
from kit.run import Run
from kit.show.style import Rows, save_figure

Given = Sequence[Run | str | Path]
"""Runs of the reader's own: run directories, or folders of them."""


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
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What that function is given besides the runs."""
    paper_panels: bool = False
    """It has panels that would be empty without points of the paper's."""

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
        drawn, rows = self._drawn(runs, for_points=points is not None)
        if points is not None:
            from kit.papers.points import add_points

            rows = add_points(drawn, rows, Path(points))
        drawn.left_out = tuple(
            f"{given} is not drawn. Drawn here: {self.takes}."
            for given in runs
            if not _names(given) & drawn.runs
        )
        return drawn, rows

    def points_template(self, name: str, runs: Given = ()) -> str:
        """Returns a file of points to fill in, with the series of this figure, which is called
        `name` there.
        """
        from kit.papers.points import template

        return template(name, self._drawn(runs, for_points=True)[0])

    def _drawn(self, runs: Given, *, for_points: bool) -> tuple[Any, Rows]:
        """Returns the figure; for points with the panels that have nothing else, which are left
        out without them.
        """
        function = pkgutil.resolve_name(f"kit.papers.{self.function}")
        panels = {"paper_panels": True} if for_points and self.paper_panels else {}
        drawn, rows = function(runs, **self.arguments, **panels)
        if for_points and not hasattr(drawn, "axes"):
            raise ConfigError(
                f"--points: {self.paper} is drawn as a table, which has no axes for points."
            )
        return drawn, rows


def _names(given: Run | str | Path) -> set[str]:
    """Returns the names under which a figure knows what was given: of a run, a report, or a
    folder and its runs.
    """
    from kit.monitor.runs import find_runs  # half of what a command would take to start

    if isinstance(given, Run):
        return {given.name}
    place = Path(given).resolve()
    return {place.name, *(run.name for run in (find_runs(place) if place.is_dir() else ()))}


_DATA = read_toml("figures")
FRONTIER, HLAT = (
    {name: PaperFigure(**fields) for name, fields in _DATA[paper].items()}
    for paper in ("frontier", "hlat")
)
FRONTIER_NOT_DRAWN, HLAT_NOT_DRAWN = _DATA["frontier_not_drawn"], _DATA["hlat_not_drawn"]
"""What of each paper is not here, and why."""
FIGURES = FRONTIER | HLAT
"""By name, as `kit figure` takes it."""


def contents(figures: dict[str, PaperFigure], not_drawn: dict[str, str]) -> Rows:
    """Returns each figure and table of a paper with where it is here, or why it is not."""
    return [
        {"of the paper": figure.paper, "here": name, "what": figure.title}
        for name, figure in figures.items()
    ] + [
        {"of the paper": what, "here": "not drawn", "what": why} for what, why in not_drawn.items()
    ]


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
        endings = ("svg", "png", "csv") if hasattr(drawn, "axes") else ("csv",)
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
