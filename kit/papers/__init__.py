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


FRONTIER: dict[str, PaperFigure] = {}
HLAT: dict[str, PaperFigure] = {}
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
