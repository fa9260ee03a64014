"""The dashboard's curves drawn with a plotly FigureWidget, for comparison with the kit's dashboard.
Data, windows and update rate are equal.
"""

import threading
from typing import Any

import numpy as np

from kit.monitor.dashboard import Dashboard, PlotRange
from kit.run import Run

SHOWN = ("loss", "mfu", "tokens_per_s", "grad_norm")
TICK_S = 0.25


class PlotlyDashboard:
    """Dashboard of four panels, each with a curve, its average and a band. A notebook cell displays
    the attribute `widget`. A thread reads new rows of the run.
    """

    def __init__(self, run: Run) -> None:
        from plotly.graph_objects import FigureWidget, Scatter
        from plotly.subplots import make_subplots

        self.dashboard, self.view = Dashboard(run), PlotRange(width=900)
        self.dashboard.read_all()
        self.widget: Any = FigureWidget(make_subplots(rows=2, cols=2, subplot_titles=SHOWN))
        for number in range(len(SHOWN)):
            place = {"row": number // 2 + 1, "col": number % 2 + 1}
            for look in ({"line_width": 0}, {"line_width": 0, "fill": "tonexty"}, {}):
                self.widget.add_trace(Scatter(mode="lines", showlegend=False, **look), **place)
        self.widget.update_layout(height=600, template="plotly_white")
        self.widget.update_xaxes(matches="x")
        self._draw()
        self.widget.layout.on_change(self._zoom, "xaxis.range")
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        wait, rows = threading.Event(), len(self.dashboard.columns)
        while not wait.wait(TICK_S):
            self.dashboard.read()
            if len(self.dashboard.columns) != rows:
                rows = len(self.dashboard.columns)
                self._draw()

    def _zoom(self, _: Any, shown: Any) -> None:
        self.view = PlotRange(width=900, start=float(shown[0]), end=float(shown[1]))
        self._draw()

    def _draw(self) -> None:
        description, window = self.dashboard.frame(self.view)
        n = description["n"]
        x = np.frombuffer(window, "<f8", n)
        rows = np.frombuffer(window, "<f4", offset=8 * n).reshape(-1, n)
        with self.widget.batch_update():
            for number, name in enumerate(SHOWN):
                first = 3 * description["charts"].index(name)
                for offset in range(3):
                    trace = self.widget.data[3 * number + offset]
                    trace.x, trace.y = x, rows[first + offset]
