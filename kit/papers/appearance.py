"""Texts and settings with which a paper's figure or table is drawn, as `data/figures.toml`
describes them.

This module imports only modules that load fast, since every command imports it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

OTHER_PANELS = "others"
"""Key in figures.toml of the default panel settings of a figure. They apply to each panel that has
no settings under its own name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Appearance:
    """Texts and settings of one figure or table, read from `data/figures.toml`.

    A text may contain placeholders such as `{batch}`. The function that computes the content of the
    figure returns their values. The placeholder `{panel}` is replaced by the name of the panel.
    """

    caption: Sequence[str] = ()
    """Lines of the caption. They say what the figure shows, which claims of the paper the kit's
    numbers confirm, and which claims they contradict. Empty lines are left out."""
    notes: Sequence[str] = ()
    """Notes below the figure on fits, assumptions and numbers that the figure does not show."""
    panels: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Maps the name of each panel to its settings: keyword arguments of
    `kit.papers.panels.set_panel`, such as ticks, legend and axis labels."""
    layouts: Sequence[Mapping[str, Any]] = ()
    """Arrangements of the panels, one for each possible number of panels. An arrangement has
    keyword arguments of `new_figure`, such as the mosaic of panels and the height in inches."""
    legend_columns: int = 0
    """Number of columns of the legend above all panels, which names the curves of the first panel.
    0: the figure has no legend above the panels."""

    def layout(self, num_panels: int) -> Mapping[str, Any]:
        """Returns the entry of `layouts` for a figure with this number of panels."""
        [found] = [
            layout for layout in self.layouts if len(set(layout["mosaic"]) - {";"}) == num_panels
        ]
        return found

    def panel_settings(self, name: str, values: Mapping[str, str]) -> dict[str, Any]:
        """Returns the settings of one panel. `values` maps each placeholder in the texts of the
        settings to the text that replaces it.
        """
        settings = self.panels.get(name, self.panels.get(OTHER_PANELS, {}))
        filled = dict(settings)
        for key, setting in settings.items():
            if isinstance(setting, str):
                filled[key] = setting.format(panel=name, **values)
        return filled
