"""A panel to play with in a notebook: a layout's memory, step and timeline, each with its interval, as it is changed.

What is drawn while somebody plays is SVG made of strings, since a figure of matplotlib takes longer than 0.2 s; the
still picture for pages without a kernel is the kit's own figures.
"""

import base64
import dataclasses
import html
import io
from functools import lru_cache
from typing import Any

import numpy as np

from cluster.record import counted
from cluster.site import Site
from kit.errors import ConfigError
from kit.estimate.choose.explain import stage_times
from kit.estimate.choose.figures import MEMORY_COLOURS, TIME_COLOURS, breakdown_figure, memory_figure
from kit.estimate.choose.search import Machine, machine_of, seconds
from kit.estimate.fit.calibrate import published_calibration
from kit.estimate.theory.hardware import Hardware
from kit.estimate.theory.layouts import Layouts
from kit.estimate.theory.memory import StageMemory, memory_by_stage
from kit.estimate.theory.schedule import Simulation, simulate_plan
from kit.estimate.theory.timeline import COLOURS, IDLE, NAMES, timeline_figure
from kit.plan import Plan
from kit.show.theme import DARK, MUTED
from kit.spec import PRESETS, ModelSpec

GIB, WIDTH = 2.0**30, 600
ROUNDS = 256
"""Operations that a device has in the timeline at most: more are thinner than a line."""
SIDE = 19.0
"""Odds of the ends of a 90 % interval, as those of running out of memory are counted: 95 to 5."""
STYLE = "".join(
    f":is([data-jp-theme-light=false],.vscode-dark) .kit-panel [fill='{light}']{{fill:{dark}}}"
    for light, dark in DARK.items()
)
FIELDS = ("tensor_parallel", "pipeline_parallel", "micro_batch_size", "recompute", "zero_stage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the estimator says of one layout: median and the ends of a 90 % interval."""

    spec: ModelSpec
    plan: Plan
    machine: Machine
    step_s: tuple[float, float, float]
    terms_s: dict[str, float]
    used_bytes: tuple[float, float, float]
    """Of the fullest device, reserve included."""
    stages: StageMemory
    risk: float
    timeline: Simulation
    """Of the first micro-batches."""

    @classmethod
    def of(cls, spec: ModelSpec, machine: Machine, plan: Plan) -> "Estimate":
        """Returns the estimate of a layout.

        Raises:
            ConfigError: the plan cannot run the model.
        """
        plan.check(spec)
        layouts = Layouts.of(spec, [plan])
        found, memory = machine.calibration.predict(layouts, machine.hardware), machine.memory(layouts)
        used = float(memory.used_bytes[0])
        spread = SIDE ** (1 / machine.reserve.sharpness)
        terms = {name: float(np.ravel(value)[0]) for name, value in found.step_time.terms_s.items()}
        shown = min(plan.num_microbatches, max(plan.pipeline_parallel, ROUNDS // (2 * plan.pipeline_parallel)))
        risk = machine.reserve.out_of_memory_probability(memory.used_bytes, float(machine.hardware.memory_bytes))
        return cls(
            spec=spec, plan=plan, machine=machine, terms_s=terms, used_bytes=(used, used / spread, used * spread),
            step_s=(float(np.ravel(found.total_s)[0]), float(found.low_s[0]), float(found.high_s[0])),
            stages=memory_by_stage(layouts, kernels=machine.kernels), risk=float(risk[0]),
            timeline=simulate_plan(plan, num_microbatches=shown, **stage_times(plan, terms, machine)),
        )  # fmt: skip

    @property
    def texts(self) -> dict[str, str]:
        """The titles of the three pictures, each with its interval."""
        time, low, high = self.step_s
        used, least, most = (value / GIB for value in self.used_bytes)
        capacity = float(self.machine.hardware.memory_bytes) / GIB
        flops = self.spec.flops_per_token() * self.plan.global_batch_size * self.spec.sequence_length
        peak = float(self.machine.hardware.peak_flops_per_s) * self.plan.num_devices
        mfu = [100 * flops / (peak * value) for value in (time, high, low)]
        idle = self.terms_s["bubble"]
        return {
            "memory": f"Memory: {used:.1f} GiB ({least:.1f} to {most:.1f}) of {capacity:.0f} on the fullest device; "
                      f"risk of running out {self.risk:.1%}",
            "step": f"Step: {seconds(time)} s ({seconds(low, 3)} to {seconds(high, 3)}); MFU {mfu[0]:.1f} % "
                    f"({mfu[1]:.1f} to {mfu[2]:.1f})",
            "timeline": f"Pipeline: {seconds(idle, 3)} s ({seconds(idle * low / time, 3)} to "
                        f"{seconds(idle * high / time, 3)}) of bubble a step; drawn: the first "
                        f"{self.timeline.order.num_microbatches} of {self.plan.num_microbatches} micro-batches",
        }  # fmt: skip

    def to_html(self) -> str:
        """Returns the three pictures for a page of either theme."""
        drawn = {"memory": self._memory(), "step": self._step(), "timeline": self._timeline()}
        parts = [f"<div>{html.escape(self.texts[name])}</div>{picture}" for name, picture in drawn.items()]
        return f"<div class='kit-panel'><style>{STYLE}</style>{''.join(parts)}</div>"

    def to_png(self) -> bytes:
        """Returns the same as one picture, for pages without a kernel."""
        from PIL import Image

        capacity = float(self.machine.hardware.memory_bytes)
        layout = f"{self.spec.name}, {self.machine.site.name}, {counted(self.plan.num_devices, 'device')}"
        figures = (memory_figure({layout: self.stages}, capacity, self.machine.reserve)[0],
                   breakdown_figure({f"{seconds(self.step_s[0])} s": self.terms_s})[0],
                   timeline_figure(self.timeline)[0])  # fmt: skip
        pictures = []
        for figure, text in zip(figures, self.texts.values(), strict=True):
            stream = io.BytesIO()
            figure.suptitle(text.replace("; ", "\n"), x=0.005, ha="left", fontsize="medium")
            figure.savefig(stream, format="png", dpi=100)
            pictures.append(Image.open(stream).convert("RGB"))
        whole = Image.new("RGB", (max(p.width for p in pictures), sum(p.height for p in pictures)), "white")
        for i, picture in enumerate(pictures):
            whole.paste(picture, (0, sum(p.height for p in pictures[:i])))
        stream = io.BytesIO()
        whole.save(stream, "PNG")
        return stream.getvalue()

    def _memory(self) -> str:
        """Returns a bar per pipeline device, stacked by term; a line at its memory, a whisker on the fullest."""
        count, height = self.plan.pipeline_parallel, 130
        held = self.stages.with_reserve(self.machine.reserve)
        terms = [np.broadcast_to(size, count) for size in held.values()]
        capacity, total = float(self.machine.hardware.memory_bytes), sum(terms)
        scale = height / (1.05 * max(capacity, self.used_bytes[2], float(np.max(total))))
        slot, bottom, parts = WIDTH / count, np.zeros(count), []
        for size, colour in zip(terms, MEMORY_COLOURS, strict=True):
            top = height - scale * (bottom + size)
            parts.append(_boxes(colour, slot * np.arange(count), top, 0.9 * slot, scale * size))
            bottom = bottom + size
        fullest, limit = slot * (int(np.argmax(total)) + 0.45), height - scale * capacity
        low, high = (height - scale * end for end in self.used_bytes[1:])
        parts += [_line(fullest, high, fullest, low, 2), _line(0, limit, WIDTH, limit, 1)]
        return _svg(parts, height) + _legend(dict(zip(held, MEMORY_COLOURS, strict=True)))

    def _step(self) -> str:
        """Returns the terms of a step as one bar, with its interval as a whisker."""
        scale, left, parts = WIDTH / max(self.step_s[2], sum(self.terms_s.values())), 0.0, []
        shown = {name: self.terms_s[name] for name in TIME_COLOURS if self.terms_s[name] > 0.005 * self.step_s[0]}
        for name, value in shown.items():
            parts.append(_boxes(TIME_COLOURS[name], left, 4.0, scale * value, 22.0))
            left += scale * value
        parts.append(_line(scale * self.step_s[1], 30, scale * self.step_s[2], 30, 3))
        return _svg(parts, 34) + _legend({name: TIME_COLOURS[name] for name in shown})

    def _timeline(self) -> str:
        order, simulation = self.timeline.order, self.timeline
        height = min(14.0, 160 / order.num_devices)
        scale, row = WIDTH / simulation.makespan_s, height * np.arange(order.num_devices)[:, None]
        parts = [_boxes(IDLE, 0.0, 0.0, WIDTH, height * order.num_devices)]
        for kind, colour in COLOURS.items():
            work = order.kind == kind
            start, end = scale * simulation.start_s[work], scale * simulation.end_s[work]
            gap = 0.4 if WIDTH / order.kind.shape[1] > 2 else 0.0
            top = np.broadcast_to(row, work.shape)[work]
            parts.append(_boxes(colour, start, top, np.maximum(end - start - gap, 0.2), 0.86 * height))
        words = {NAMES[kind]: colour for kind, colour in COLOURS.items() if (order.kind == kind).any()}
        return _svg(parts, height * order.num_devices) + _legend(words | {"waiting": IDLE})


class Panel:
    """Controls for a layout with its `Estimate` below; impossible ones are answered with the reason.

    The arguments are what it begins with; what has no control stays as the first plan has it, but for the engine, which
    is the machine's. `plan` is the layout as it stands, None where it is impossible; the button writes it as Python.
    """

    def __init__(self, model: str, site: str, plan: Plan) -> None:
        import ipywidgets as widgets

        style, layout = {"description_width": "90px"}, widgets.Layout(width="235px")

        def choice(name: str, options: Any, value: Any) -> Any:
            return widgets.Dropdown(description=name, options=options, value=value, style=style, layout=layout)

        def number(name: str, value: int) -> Any:
            return widgets.BoundedIntText(description=name, value=value, min=1, max=10**6, style=style, layout=layout)

        self.controls = {
            "model": choice("model", list(PRESETS), model),
            "site": choice("machine", [name for name in Site.names() if _is_known(name)], site),
            "devices": number("devices", plan.num_devices),
            "global_batch_size": number("global batch", plan.global_batch_size),
            "tensor_parallel": number("tensor", plan.tensor_parallel),
            "pipeline_parallel": number("pipeline", plan.pipeline_parallel),
            "micro_batch_size": number("micro-batch", plan.micro_batch_size),
            "recompute": choice("recompute", ["none", "selective", "full"], plan.recompute),
            "zero_stage": choice("ZeRO", [0, 1, 2, 3], plan.zero_stage),
        }
        self.view, self.text = widgets.HTML(), widgets.HTML()
        button = widgets.Button(description="Plan(...)", tooltip="this layout as Python", layout=layout)
        button.on_click(lambda _: self.write())
        for control in self.controls.values():
            control.observe(lambda _: self.update(), "value")
        wrap = widgets.Layout(flex_flow="row wrap")
        self.box = widgets.VBox([widgets.HBox([*self.controls.values(), button], layout=wrap), self.text, self.view])
        self.first, self.plan = plan, None
        self.update()

    def estimate(self) -> Estimate:
        """Returns the estimate of what the controls say.

        Raises:
            ConfigError: it is impossible.
        """
        asked = {name: control.value for name, control in self.controls.items()}
        spec, machine = ModelSpec.preset(asked["model"]), _machine(asked["site"])
        degrees = asked["tensor_parallel"] * asked["pipeline_parallel"]
        if asked["devices"] % degrees:
            raise ConfigError(
                f"devices: {asked['devices']} is no multiple of tensor x pipeline = {degrees}. Use "
                f"{max(1, round(asked['devices'] / degrees)) * degrees}, or change a degree."
            )
        engine = machine.site.engine
        plan = self.first.replace(
            **{name: asked[name] for name in (*FIELDS, "global_batch_size")}, data_parallel=asked["devices"] // degrees,
            sequence_parallel=asked["tensor_parallel"] > 1 and engine != "deepspeed", precision="bf16", engine=engine,
        )  # fmt: skip
        return Estimate.of(spec, machine, plan)

    def update(self) -> None:
        """Draws what the controls say, or says why that is impossible."""
        self.text.value, self.plan = "", None
        try:
            found = self.estimate()
        except ConfigError as error:
            self.view.value = f"<div class='kit-panel' role='alert'>⚠ Impossible: {html.escape(str(error))}</div>"
            return
        hidden = f"<style>.{self._still} {{display: none !important}}</style>"
        self.plan, self.view.value = found.plan, found.to_html() + hidden

    def write(self) -> None:
        """Writes the layout as Python below the controls."""
        if self.plan is not None:
            stated = {field.name: getattr(self.plan, field.name) for field in dataclasses.fields(self.plan)
                      if getattr(self.plan, field.name) != field.default}  # fmt: skip
            code = f"kit.Plan({', '.join(f'{name}={value!r}' for name, value in stated.items())})"
            self.text.value = f"<pre style='white-space:pre-wrap;line-height:1.4'>{html.escape(code)}</pre>"

    @property
    def _still(self) -> str:
        return f"kit-still-{self.box.model_id}"

    def _ipython_display_(self) -> None:
        """Shows the panel, and a still of it, which the panel's own style hides where it lives."""
        from IPython.display import display

        display(self.box)
        if self.plan is not None:
            picture = base64.b64encode(self.estimate().to_png()).decode()
            image = f"<img class='{self._still}' alt='the panel' src='data:image/png;base64,{picture}'>"
            display({"image/png": picture, "text/html": image, "text/plain": str(self.plan)}, raw=True)


@lru_cache(maxsize=4)
def _machine(site: str) -> Machine:
    loaded = Site.load(site)
    return machine_of(loaded, published_calibration(loaded))


def _is_known(site: str) -> bool:
    try:
        return bool(Hardware.of(Site.load(site)))
    except ConfigError:
        return False


def _boxes(colour: str, left: Any, top: Any, width: Any, height: Any) -> str:
    """Returns rectangles of one colour as one path."""
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(value, float)) for value in (left, top, width, height)))
    each = (f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z" for x, y, w, h in zip(*columns, strict=True))
    return f"<path fill='{colour.lower()}' d='{''.join(each)}'/>"


def _line(x1: float, y1: float, x2: float, y2: float, width: float) -> str:
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {ends} stroke='currentColor' stroke-width='{width}'/>"


def _svg(parts: list[str], height: float) -> str:
    style = f"width:100%;max-width:{WIDTH}px;display:block;margin:2px 0 6px"
    return f"<svg role='img' viewBox='0 0 {WIDTH} {height:.0f}' style='{style}'>{''.join(parts)}</svg>"


def _legend(colours: dict[str, str]) -> str:
    box = "<svg width='10' height='10'><rect width='10' height='10' fill='{}'/></svg> {}"
    words = [box.format(colour.lower(), name.replace("_", " ")) for name, colour in colours.items()]
    items = "".join(f"<span style='margin-right:10px;white-space:nowrap'>{word}</span>" for word in words)
    return f"<div style='{MUTED};max-width:{WIDTH}px;line-height:1.5;margin-bottom:8px'>{items}</div>"
