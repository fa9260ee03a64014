"""Texts and settings with which a paper's figure or table is drawn, as `data/figures.toml`
describes them.

This module imports only modules that load fast, since every command imports it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

OTHER_PANELS = "others"
"""Key in figures.toml of the settings for all panels without settings under their own name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Appearance:
    """Texts and settings of one figure or table, read from `data/figures.toml`.

    A text may contain placeholders such as `{batch}`. The function that computes the content of the
    figure returns their values. The placeholder `{panel}` is replaced by the name of the panel.
    """

    caption: Sequence[str] = ()
    """Lines of the caption: what the figure shows, which claims hold, and which are missed. Empty
    lines are left out."""
    notes: Sequence[str] = ()
    """Notes below the figure on fits, assumptions and numbers that the figure does not show."""
    panels: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Maps the name of each panel to its settings, which are keyword arguments of `set_panel`."""
    layouts: Sequence[Mapping[str, Any]] = ()
    """Keyword arguments of `new_figure`, such as mosaic and height. The list has one entry for each
    possible number of panels."""
    legend_columns: int = 0
    """Number of columns of a legend above all panels, which names the lines of the first panel. 0:
    the figure has no such legend."""

    def layout(self, num_panels: int) -> Mapping[str, Any]:
        """Returns the entry of `layouts` for a figure with this number of panels."""
        [found] = [
            layout for layout in self.layouts if len(set(layout["mosaic"]) - {";"}) == num_panels
        ]
        return found

    def panel_settings(self, name: str, values: Mapping[str, str]) -> dict[str, Any]:
        """Returns the settings of one panel. Placeholders in texts are replaced by `values`."""
        settings = self.panels.get(name, self.panels.get(OTHER_PANELS, {}))
        filled = dict(settings)
        for key, setting in settings.items():
            if isinstance(setting, str):
                filled[key] = setting.format(panel=name, **values)
        return filled
