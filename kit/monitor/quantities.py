"""Names, formats and units of the quantities (such as loss or MFU) that the views of a run show.

The dashboard, the terminal, the figures and the table of runs use this module. Only the JavaScript
front end of the dashboard has separate rules for formats, since its numbers must fit into tiles.
"""

import dataclasses

from kit.show.terminal import format_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantity:
    """Names, format and unit of one number of a training step, for all views."""

    label: str
    """Short name that is written beside a value in text."""
    text_format: str = "g"
    """Python format specification of a value in text."""
    title: str = ""
    """Title of the chart of this quantity, with its unit. Empty if no chart shows the quantity."""
    chart_factor: int = 1
    """Factor by which a value is multiplied before it is drawn in a chart, for example 100 for per
    cent."""


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
"""All quantities, by their names in rows of metrics.jsonl and in `Curves`."""


def quantity_text(name: str, value: float | None) -> str:
    """Returns a value of the quantity `name` as text. Returns a dash for None."""
    return format_number(value, QUANTITIES[name].text_format)
