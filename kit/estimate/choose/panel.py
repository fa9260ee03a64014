"""Interactive panel for a notebook: controls for a layout, with its memory, step time and pipeline
timeline.
"""

import base64
import dataclasses
import html
import io
import math
from functools import lru_cache
from typing import Any, get_args

import numpy as np

from cluster.site import Site
from kit.config.plan import Plan, Precision, Recompute, Schedule
from kit.config.spec import PRESETS, ModelSpec
from kit.engines.build import check_site
from kit.engines.capabilities import EngineName
from kit.errors import ConfigError
from kit.estimate.choose.figures import breakdown_figure, memory_figure
from kit.estimate.choose.machine import Machine, machine_of
from kit.estimate.choose.search import seconds_text
from kit.estimate.fit.calibrate import own_calibration
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.memory import StageMemory, memory_by_stage
from kit.estimate.theory.schedule import Simulation, simulate_plan
from kit.estimate.theory.state import convention_of
from kit.estimate.theory.timeline import timeline_figure
from kit.show.style import new_figure
from kit.show.theme import GREY, INK

GIB = 2.0**30
WIDTH = 600
DPI = 192
MOST_OPERATIONS = 256
"""Largest number of forward and backward passes per device that the timeline draws. With more
passes, the box of a pass would be thinner than a line. At least two micro-batches per pipeline
device are drawn, even if their passes exceed this number."""
SIDE = 19.0
"""Odds at the upper end of a 90 % interval: 95 % against 5 %. The interval of used bytes is
computed from these odds and from `Reserve.sharpness` (steepness of the out-of-memory
probability)."""
DARK_PAGE = (
    ":is([data-jp-theme-light=false],.vscode-dark) :is(.kit-panel,.kit-panel-still) img"
    " {filter: invert(0.93) hue-rotate(180deg)}"
)
"""CSS rule that inverts the picture of the panel on a dark page, both the live picture and the
picture in a saved notebook."""
FIELDS = (
    "global_batch_size",
    "tensor_parallel",
    "sequence_parallel",
    "pipeline_parallel",
    "virtual_stages",
    "schedule",
    "micro_batch_size",
    "recompute",
    "zero_stage",
    "precision",
    "compile",
    "engine",
)
"""Fields of the plan whose value is the unchanged value of the panel's control (input element) with
the field's name."""
OPTIONAL = ("shard_size", "recompute_layers")
"""Fields of the plan that may be None. The panel's control (input element) for such a field shows 0
for None."""
FLAGS = (("no", False), ("yes", True))
"""Choices of a control for a Boolean field, as pairs (label, value)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated step time, memory and pipeline timeline of one layout. Step time and memory have
    90 % intervals.
    """

    spec: ModelSpec
    plan: Plan
    machine: Machine
    step_s: tuple[float, float, float]
    """Seconds per step, as (median, low end of the 90 % interval, high end of the interval)."""
    terms_s: dict[str, float]
    """Maps each term of the modelled step time, e.g. `gemm`, to its seconds. The seconds add up to
    the median step time."""
    used_bytes: tuple[float, float, float]
    """Bytes of the device that needs most memory, as (median, low end of the 90 % interval, high
    end of the interval). The reserve for memory that is not modelled is included."""
    stages: StageMemory
    risk: float
    """Probability, 0 to 1, that the layout runs out of memory."""
    timeline: Simulation
    """Simulated pipeline schedule of the complete training step. If the step is too long to draw,
    only its first micro-batches are simulated."""
    drawn_microbatches: int
    """Number of micro-batches that the first pipeline device starts within the drawn part of the
    timeline."""

    @classmethod
    def of(cls, spec: ModelSpec, machine: Machine, plan: Plan) -> "Estimate":
        """Returns the estimate of a plan on a machine. The plan is estimated exactly as given,
        without replacing any field by a default.

        Raises:
            ConfigError: The plan cannot run the model, or its precision is fp32, which the planner
                does not estimate.
        """
        plan.check(spec)
        if plan.precision == "fp32":
            raise ConfigError(
                "plan.precision: 'fp32' is not estimated here: times and bytes are those of 16-bit"
                " training. Use 'bf16', or 'fp16' with engine 'deepspeed'."
            )
        layouts = Layouts.of(spec, [plan])
        found = machine.calibration.predict(layouts, machine.hardware)
        memory = machine.memory(layouts)
        used = float(memory.used_bytes[0])
        spread = SIDE ** (1 / machine.reserve.sharpness)
        terms = {name: float(np.ravel(value)[0]) for name, value in found.step_time.terms_s.items()}
        simulated, drawn = _timeline_microbatches(plan)
        return cls(
            spec=spec,
            plan=plan,
            machine=machine,
            terms_s=terms,
            used_bytes=(used, used / spread, used * spread),
            step_s=(
                float(np.ravel(found.total_s)[0]),
                float(found.low_s[0]),
                float(found.high_s[0]),
            ),
            stages=memory_by_stage(layouts, kernels=machine.kernels, convention=machine.convention),
            risk=float(machine.risk(memory.used_bytes)[0]),
            timeline=simulate_plan(
                plan, num_microbatches=simulated, **machine.stage_times(spec, plan, terms)
            ),
            drawn_microbatches=drawn,
        )

    @property
    def titles(self) -> dict[str, str]:
        """Maps the names of the three figures, `memory`, `step` and `timeline`, to their titles.
        Each title states the main numbers of its figure with 90 % intervals.
        """
        time_s, low_s, high_s = self.step_s
        used, least, most = (value / GIB for value in self.used_bytes)
        capacity = float(self.machine.hardware.memory_bytes) / GIB
        tokens = self.plan.global_batch_size * self.spec.sequence_length
        peak = float(self.machine.hardware.peak_flops_per_s) * self.plan.num_devices
        peak_s = self.spec.flops_per_token() * tokens / peak
        mfu, highest_mfu, lowest_mfu = (100 * peak_s / value for value in self.step_s)
        idle_s = self.terms_s["bubble"]
        idle = seconds_text(idle_s, 3)
        idle_low = seconds_text(idle_s * low_s / time_s, 3)
        idle_high = seconds_text(idle_s * high_s / time_s, 3)
        drawn = "the whole step"
        if self.drawn_microbatches < self.plan.num_microbatches:
            drawn = (
                f"the first {self.drawn_microbatches} of {self.plan.num_microbatches:,}"
                " micro-batches, then cut"
            )
        return {
            "memory": (
                f"Memory: {used:.1f} GiB ({least:.1f} to {most:.1f}) of {capacity:.0f} on the"
                f" fullest device; risk of running out {self.risk:.1%}"
            ),
            "step": (
                f"Step: {seconds_text(time_s)} s ({seconds_text(low_s, 3)} to"
                f" {seconds_text(high_s, 3)}); MFU {mfu:.1f} % ({lowest_mfu:.1f} to"
                f" {highest_mfu:.1f})"
            ),
            "timeline": (
                f"Pipeline: bubble {idle_s / time_s:.1%} of the step, {idle} s ({idle_low} to"
                f" {idle_high}); drawn: {drawn}"
            ),
        }

    def to_png(self, *above: Any) -> bytes:
        """Returns a PNG picture with the figures `above`, then the three figures of the estimate.
        The figures are placed one below the other.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from PIL import Image

        figures = (*above, *self.figures())
        stream = io.BytesIO()
        canvases = [FigureCanvasAgg(figure) for figure in figures]
        for canvas in canvases:
            canvas.draw()
        whole = np.concatenate([np.asarray(canvas.buffer_rgba()) for canvas in canvases])
        Image.fromarray(whole).convert("RGB").save(stream, "PNG", compress_level=1)
        return stream.getvalue()

    def figures(self) -> tuple[Any, Any, Any]:
        """Returns (memory figure, step time figure, pipeline timeline figure). Black lines show the
        90 % intervals of memory and step time.
        """
        capacity = float(self.machine.hardware.memory_bytes)
        ends = np.array(self.used_bytes[1:]) / GIB
        memory, rows = memory_figure({"": self.stages}, capacity, self.machine.reserve)
        fullest = max(rows, key=lambda row: row["GiB"])["stage"]
        memory.axes[0].plot([fullest, fullest], ends, color=INK, linewidth=2)
        memory.axes[0].set_ylim(0, max(memory.axes[0].get_ylim()[1], 1.05 * ends[1]))
        step, _ = breakdown_figure({"": self.terms_s})
        timeline, _ = timeline_figure(self.timeline, drawn_microbatches=self.drawn_microbatches)
        percent = 100 * np.array(self.step_s[1:]) / self.step_s[0]
        step.axes[0].plot(percent, [0.43, 0.43], color=INK, linewidth=3)
        step.axes[0].set_xlim(0, max(100, percent[1]))
        # Labels and numbers are removed from the timeline: drawing each of them takes 1 ms.
        timeline.axes[0].set_yticks([])
        for text in [*timeline.axes[0].texts]:
            text.remove()
        for figure, title in zip((memory, step, timeline), self.titles.values(), strict=True):
            _lay_out(figure, title.replace("; ", "\n"))
        return memory, step, timeline


def _timeline_microbatches(plan: Plan) -> tuple[int, int]:
    """Returns (simulated micro-batches, drawn micro-batches) for the timeline of a plan.

    A round is one micro-batch per pipeline device. A short step is drawn completely. For a long
    step two or more rounds are drawn: the fill of the pipeline, and at least one round of the
    steady state. Two more rounds are simulated but not drawn, so that the drawn part is equal to
    the beginning of the complete step.
    """
    p = plan.pipeline_parallel
    v = plan.virtual_stages
    m = plan.num_microbatches
    wanted = max(4, math.ceil(16 / p))
    rounds = max(2, min(wanted, MOST_OPERATIONS // (2 * p * v)))
    drawn = rounds * p
    simulated = (rounds + 2) * p
    return (m, m) if m <= simulated else (simulated, drawn)


def _lay_out(figure: Any, title: str) -> None:
    """Writes the title above a figure, and sets its margins so that title and legend have room.
    Matplotlib's layout engine would do this, but would take half of the drawing time.
    """
    figure.set_layout_engine(None)
    figure.dpi = DPI
    height = figure.get_figheight()
    figure.axes[0].set_title(title, loc="left")
    legend = figure.legends[0].get_window_extent().height / DPI
    figure.subplots_adjust(
        left=0.11, right=0.92, bottom=(0.6 + legend) / height, top=1 - 0.5 / height
    )


class Panel:
    """Panel for a notebook, with controls for a layout and figures of its estimated memory, step
    time and timeline. If the layout is impossible, the panel shows the reason instead of figures.

    The arguments of the constructor are the first values of the controls. The attribute `plan` is
    the layout that the panel shows, with exactly the values of the controls. It is None if the
    layout is impossible. A button writes the layout as Python code.
    """

    def __init__(self, model: str, site: str, plan: Plan) -> None:
        import ipywidgets as widgets

        style = {"description_width": "90px"}
        layout = widgets.Layout(width="235px")

        def choice(name: str, options: Any, value: Any) -> Any:
            return widgets.Dropdown(
                description=name, options=options, value=value, style=style, layout=layout
            )

        def number(name: str, value: int, least: int = 1) -> Any:
            return widgets.BoundedIntText(
                description=name, value=value, min=least, max=10**6, style=style, layout=layout
            )

        def named(name: str, options: Any, value: Any) -> Any:
            return choice(name, list(get_args(options)), value)

        self.controls = {
            "model": choice("model", list(PRESETS), model),
            "site": choice("machine", [name for name in Site.names() if _is_known(name)], site),
            "devices": number("devices", plan.num_devices),
            "global_batch_size": number("global batch", plan.global_batch_size),
            "micro_batch_size": number("micro-batch", plan.micro_batch_size),
            "zero_stage": choice("ZeRO", [0, 1, 2, 3], plan.zero_stage),
            "shard_size": number("shard (0: all)", plan.shard_size or 0, least=0),
            "tensor_parallel": number("tensor", plan.tensor_parallel),
            "sequence_parallel": choice("sequence", FLAGS, plan.sequence_parallel),
            "recompute": named("recompute", Recompute, plan.recompute),
            "recompute_layers": number("layers (0: all)", plan.recompute_layers or 0, least=0),
            "pipeline_parallel": number("pipeline", plan.pipeline_parallel),
            "virtual_stages": number("stages each", plan.virtual_stages),
            "schedule": named("schedule", Schedule, plan.schedule),
            "engine": named("engine", EngineName, plan.engine),
            "precision": named("precision", Precision, plan.precision),
            "compile": choice("compile", FLAGS, plan.compile),
        }
        self.view = widgets.HTML()
        self.text = widgets.HTML()
        button = widgets.Button(
            description="Plan(...)", tooltip="this layout as Python", layout=layout
        )
        button.on_click(lambda _: self.write())
        for control in self.controls.values():
            control.observe(lambda _: self.update(), "value")
        wrap = widgets.Layout(flex_flow="row wrap")
        self.box = widgets.VBox(
            [widgets.HBox([*self.controls.values(), button], layout=wrap), self.text, self.view]
        )
        self.first = plan
        self.plan = None
        self.update()

    def estimate(self) -> Estimate:
        """Returns the estimate of the layout that the controls describe.

        Raises:
            ConfigError: The layout is impossible.
        """
        asked = {name: control.value for name, control in self.controls.items()}
        spec = ModelSpec.preset(asked["model"])
        site = Site.load(asked["site"])
        degrees = (
            asked["tensor_parallel"] * asked["pipeline_parallel"] * self.first.context_parallel
        )
        if asked["devices"] % degrees:
            raise ConfigError(
                f"devices: {asked['devices']} is no multiple of tensor x pipeline = {degrees}. Use "
                f"{max(1, round(asked['devices'] / degrees)) * degrees}, or change a degree."
            )
        plan = self.first.replace(
            **{name: asked[name] for name in FIELDS},
            **{name: asked[name] or None for name in OPTIONAL},
            data_parallel=asked["devices"] // degrees,
        )
        check_site(spec, plan, site)
        convention = convention_of(plan.precision, plan.engine, plan.zero_stage)
        machine = _machine(asked["site"], plan.engine)
        return Estimate.of(spec, dataclasses.replace(machine, convention=convention), plan)

    def update(self) -> None:
        """Draws the figures for the layout that the controls describe. If the layout is impossible,
        the reason is shown instead of the figures.
        """
        self.text.value = ""
        self.plan = None
        # In a live notebook, this style hides the saved picture of the panel. The panel contains
        # the style even while it shows an error.
        style = f"<style>{DARK_PAGE}.{self._still} {{display: none !important}}</style>"
        try:
            found = self.estimate()
        except ConfigError as error:
            text = f"⚠ Impossible: {html.escape(str(error))}"
            self.view.value = f"<div class='kit-panel' role='alert'>{style}{text}</div>"
            return
        self.plan = found.plan
        image = _image(found.to_png(), alt="; ".join(found.titles.values()))
        self.view.value = f"<div class='kit-panel'>{style}{image}</div>"

    def write(self) -> None:
        """Shows the layout as Python code below the controls. Without a possible layout nothing is
        shown.
        """
        if self.plan is not None:
            stated = {
                field.name: getattr(self.plan, field.name)
                for field in dataclasses.fields(self.plan)
                if getattr(self.plan, field.name) != field.default
            }
            code = f"kit.Plan({', '.join(f'{name}={value!r}' for name, value in stated.items())})"
            self.text.value = (
                f"<pre style='white-space:pre-wrap;line-height:1.4'>{html.escape(code)}</pre>"
            )

    @property
    def _still(self) -> str:
        return f"kit-still-{self.box.model_id}"

    def _ipython_display_(self) -> None:
        """Shows the panel and a picture of the panel with its controls. A saved notebook shows only
        the picture. While the panel is live, a CSS style of the panel hides the picture.
        """
        from IPython.display import display

        display(self.box)
        if self.plan is not None:
            picture = self.estimate().to_png(self._controls_figure())
            image = _image(picture, alt="the panel")
            names = f"kit-panel-still {self._still}"
            page = f"<div class='{names}'><style>{DARK_PAGE}</style>{image}</div>"
            still = {"image/png": base64.b64encode(picture).decode(), "text/html": page}
            display({**still, "text/plain": str(self.plan)}, raw=True)

    def _controls_figure(self) -> Any:
        """Returns a figure that shows the label and the value of each control, with three controls
        per line.
        """
        rows = math.ceil(len(self.controls) / 3)
        with new_figure(height=0.37 * rows) as (figure, axis):
            axis.axis("off")
            for number, control in enumerate(self.controls.values()):
                x = 0.03 + number % 3 / 3
                y = 1 - (number // 3 + 0.5) / rows
                value = getattr(control, "label", control.value)
                figure.text(
                    x,
                    y,
                    f"{control.description}: {value}",
                    va="center",
                    bbox={"boxstyle": "round,pad=0.3", "facecolor": "none", "edgecolor": GREY},
                )
        figure.dpi = DPI
        return figure


def _image(png: bytes, *, alt: str) -> str:
    """Returns an HTML `img` element that contains the PNG picture. `alt` is the text for readers
    who cannot see the picture.
    """
    return (
        f"<img alt='{html.escape(alt, quote=True)}' width='{WIDTH}' style='max-width:100%'"
        f" src='data:image/png;base64,{base64.b64encode(png).decode()}'>"
    )


@lru_cache(maxsize=4)
def _machine(site: str, engine: EngineName) -> Machine:
    loaded = Site.load(site)
    return machine_of(loaded, own_calibration([], loaded), engine=engine)


def _is_known(site: str) -> bool:
    try:
        return bool(Hardware.of(Site.load(site)))
    except ConfigError:
        return False
