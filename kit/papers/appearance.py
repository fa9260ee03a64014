"""How a figure or a table of a paper looks, as `data/figures.toml` describes it.

This module imports nothing that takes time, since every command imports it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

OTHER_PANELS = "others"
"""Name in figures.toml of the settings of all panels that have none of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Appearance:
    """The texts and settings of a figure or a table, as `data/figures.toml` has them.

    Each text may have placeholders such as `{batch}`, whose values the content has. The placeholder
    `{panel}` is the name of a panel.
    """

    caption: Sequence[str] = ()
    """What is drawn, what holds, and what is missed. An empty line is left out."""
    notes: Sequence[str] = ()
    """Fits, assumptions and numbers that are not in the picture."""
    panels: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Settings of each panel by its name, as `set_panel` takes them."""
    layouts: Sequence[Mapping[str, Any]] = ()
    """Arguments of `new_figure`, such as mosaic and height, one for each possible number of
    panels."""
    legend_columns: int = 0
    """Columns of a legend above all panels, of what the first panel shows. 0: no such legend."""

    def layout(self, num_panels: int) -> Mapping[str, Any]:
        """Returns the layout for this number of panels."""
        [found] = [
            layout for layout in self.layouts if len(set(layout["mosaic"]) - {";"}) == num_panels
        ]
        return found

    def panel_settings(self, name: str, values: Mapping[str, str]) -> dict[str, Any]:
        """Returns the settings of one panel, with values in place of placeholders."""
        settings = self.panels.get(name, self.panels.get(OTHER_PANELS, {}))
        filled = dict(settings)
        for key, setting in settings.items():
            if isinstance(setting, str):
                filled[key] = setting.format(panel=name, **values)
        return filled
