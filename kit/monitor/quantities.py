"""Names and formats of the quantities that the views of a run show.

Dashboard, terminal, figures and the table of runs use this module. Only the dashboard's front end
has separate rules for formats, since its numbers must fit into tiles.
"""

import dataclasses

from kit.show.terminal import number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantity:
    """Names, format and unit of one number of a step in all views."""

    label: str
    """Name beside a value in text."""
    text_format: str = "g"
    """Format of a value in text."""
    title: str = ""
    """Title of a chart, with the unit of the chart. Empty if no chart shows the quantity."""
    chart_factor: int = 1
    """Factor by which a value is multiplied for charts, for example 100 for per cent."""


QUANTITIES = {
    "loss": Quantity(label="loss", text_format=".4f", title="Loss, nats per token"),
    "validation_loss": Quantity(label="validation", text_format=".4f"),
    "mfu": Quantity(label="MFU", text_format=".1%", title="MFU, % of peak", chart_factor=100),
    "hfu": Quantity(label="HFU", text_format=".1%"),
    "tokens_per_s": Quantity(label="tokens/s", text_format=",.0f", title="Tokens per second"),
    "step_time_s": Quantity(label="s/step", text_format=".3g"),
    "grad_norm": Quantity(label="grad norm", text_format=".3f", title="Gradient norm"),
    "learning_rate": Quantity(label="learning rate", title="Learning rate"),
    "memory_bytes": Quantity(label="memory", title="Memory of rank 0"),
}
"""All quantities, by their name in rows of metrics and in curves."""


def quantity_text(name: str, value: float | None) -> str:
    """Returns a value of a quantity as text. None is a dash."""
    return number(value, QUANTITIES[name].text_format)
