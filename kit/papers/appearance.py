"""Texts and settings of a paper's figure or table, as `data/figures.toml` describes them.

This module imports nothing that is slow to load, since every command imports it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

OTHER_PANELS = "others"
"""Key in figures.toml of the settings of all panels that have no settings of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Appearance:
    """Texts and settings of a figure or a table, as `data/figures.toml` has them.

    A text may have placeholders such as `{batch}`. Their values are in the content. The placeholder
    `{panel}` is the name of a panel.
    """

    caption: Sequence[str] = ()
    """Lines of the caption: what the figure shows, which claims hold, and which are missed. Empty
    lines are left out."""
    notes: Sequence[str] = ()
    """Notes on fits, assumptions and numbers that are not in the picture."""
    panels: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Keyword arguments of `set_panel` for each panel, by the panel's name."""
    layouts: Sequence[Mapping[str, Any]] = ()
    """Keyword arguments of `new_figure`, such as mosaic and height. One entry for each possible
    number of panels."""
    legend_columns: int = 0
    """Columns of a legend above all panels, which names the lines of the first panel. 0: no such
    legend."""

    def layout(self, num_panels: int) -> Mapping[str, Any]:
        """Returns the entry of `layouts` for a figure with this number of panels."""
        [found] = [
            layout for layout in self.layouts if len(set(layout["mosaic"]) - {";"}) == num_panels
        ]
        return found

    def panel_settings(self, name: str, values: Mapping[str, str]) -> dict[str, Any]:
        """Returns the settings of one panel, with `values` in place of the placeholders."""
        settings = self.panels.get(name, self.panels.get(OTHER_PANELS, {}))
        filled = dict(settings)
        for key, setting in settings.items():
            if isinstance(setting, str):
                filled[key] = setting.format(panel=name, **values)
        return filled
