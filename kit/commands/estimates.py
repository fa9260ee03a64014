"""Commands on estimates and machines: plan, validate, calibrate, bench, doctor."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from cluster.files import write_atomic
from cluster.local import MAX_PROCESSES
from cluster.record import ConfigError, counted
from kit.commands.options import JsonOption, console, facts_table, tell
from kit.plan import EngineName, Precision
from kit.show.terminal import PlainConsole, Table

app = typer.Typer()
bench_app = typer.Typer(no_args_is_help=True)
app.add_typer(bench_app, name="bench", help="Measure the machine at hand.")


@app.command()
def plan(
    site: Annotated[str, typer.Option(help="the machine: a name or a .toml file")],
    devices: Annotated[int, typer.Option(help="how many; all are used")],
    batch: Annotated[int, typer.Option(help="sequences in one optimizer step")],
    name: Annotated[
        str | None,
        typer.Argument(
            help="preset, spec.json, config.json or torchtitan:FLAVOUR", metavar="MODEL"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="the same, or Megatron's arguments (a text or a .txt)")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="training budget, for days and price, e.g. 1.8e12")
    ] = None,
    max_risk: Annotated[
        float, typer.Option(help="highest accepted probability of running out of memory")
    ] = 0.05,
    count: Annotated[int, typer.Option(help="layouts to show")] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help="field=value,value: e.g. schedule=1f1b,interleaved")
    ] = None,
    engine: Annotated[
        EngineName | None, typer.Option(help="what would run it; default: the site's")
    ] = None,
    precision: Annotated[
        Precision, typer.Option(help="of matrix products; fp8, mxfp8: planned, not trained")
    ] = "bf16",
    choose: Annotated[int, typer.Option(help="which of the layouts to explain and keep")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="keep it, NAME.json; `kit launch --plan` takes it")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest layout of a model on a machine, and say why it is."""
    from kit.estimate.choose.report import plan_report

    if (asked := name or model) is None or name and model:
        raise ConfigError("MODEL: give one, as in `kit plan gpt-175b`, or by --model.")
    if out is not None:
        _check_out(out)
    report = plan_report(
        asked,
        site=site,
        devices=devices,
        batch=batch,
        tokens=tokens,
        max_risk=max_risk,
        count=count,
        choose=choose,
        engine=engine,
        precision=precision,
        only=_choices(only or []),
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        report.chosen.plan.write(out)
    layouts = Table(*report.header, title=report.search.title, rows=report.rows)
    tell(report.to_dict(), as_json, layouts, facts_table("", report.chosen.facts()))
    if out is not None and not as_json:
        console().print(Text(f"Layout {choose} is in {out}."), soft_wrap=True)


@app.command()
def validate(
    rows: Annotated[
        Path | None, typer.Option(help="CSV of other runs, columns as in published_runs.csv")
    ] = None,
    calibrate: Annotated[
        int | None, typer.Option(help="with --rows: runs of each machine to fit first")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="with --calibrate: which half of the rows they are chosen from")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Print the estimator's error on published runs, whole groups held out, or on those of a
    CSV.
    """
    if rows is None and calibrate is not None:
        raise ConfigError(
            f"--calibrate {calibrate}: only with --rows FILE, whose machines it fits. Give both."
        )
    from kit.estimate.validation.validate import validate as validate_runs
    from kit.show.results import format_value

    found = validate_runs(rows, calibrate, seed)
    met = {True: Text("yes", style="green"), False: Text("no", style="red"), None: Text()}
    lines = [
        (r.name, format_value(r.value, r.unit), r.target, met[r.ok], Text(r.note, style="dim"))
        for r in found
    ]
    table = Table(
        "", "found", "target", "met", "", title="Estimates against measurements", rows=lines
    )
    tell([item.to_dict() for item in found], as_json, table)


@app.command()
def calibrate(
    runs: Annotated[
        list[Path], typer.Argument(help="run directories of one machine", metavar="RUN...")
    ],
    site: Annotated[str | None, typer.Option(help="the machine; default: that of the runs")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit the estimator's efficiencies to measured runs, and say which of them the runs do not
    tell.
    """
    from cluster.site import Site
    from kit.estimate.fit.calibrate import calibrate as fit

    found = fit(runs, Site.load(site) if site else None)
    coefficients = found.coefficients.to_dict()
    rows = [
        (name, f"{value:.4g}", "no" if name in found.unidentified else "yes")
        for name, value in coefficients.items()
    ]
    title = f"{counted(found.num_runs, 'attempt')}, {found.error:.1%} mean error on them"
    record = {
        "coefficients": coefficients,
        "unidentified": found.unidentified,
        "num_runs": found.num_runs,
    }
    table = Table("coefficient", "value", "told by the runs", title=title, rows=rows)
    tell({**record, "error": found.error}, as_json, table)


@bench_app.command("site")
def bench_site(
    processes: Annotated[
        int, typer.Option(help="over which collectives are measured", min=2, max=MAX_PROCESSES)
    ] = 2,
    out: Annotated[
        Path | None, typer.Option(help="keep them as a site file, NAME.toml; --site takes it")
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(help="only measure the peak again, into a run's site.json", metavar="RUN"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure matrix products, memory and collectives of this machine; or again the peak that a
    run's MFU rests on.
    """
    from cluster.site import Site
    from kit.measure.gemm import measured_site
    from kit.measure.site import measure_site, to_toml

    if apply is not None:
        if out is not None:
            raise ConfigError(
                f"--out {out}: not with --apply, which writes into the run. Give one of them."
            )
        _apply_peak(apply, as_json)
        return
    if out is not None and out.suffix != ".toml":
        raise ConfigError(f"--out {out}: not a .toml file. Give a name that ends in .toml.")
    PlainConsole(stderr=True).print(
        "Measuring matrix products, memory and collectives; up to two minutes ..."
    )
    site = measured_site(Site.load("laptop"), "bf16")  # what layouts are planned in
    site = measure_site(site, num_processes=processes)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, to_toml(site.replace(name=out.stem)))
    facts = {
        f"peak {dtype}, FLOP/s": str(fact) for dtype, fact in site.device.peak_flops_per_s.items()
    }
    facts |= {"memory, bytes/s": str(site.device.memory_bytes_per_s)}
    links = site.links.intra_node
    facts |= {
        f"within {link.num_devices} processes, bytes/s": str(link.bytes_per_s) for link in links
    }
    tell(site.to_dict(), as_json, facts_table(site.description, facts.items()))


def _apply_peak(directory: Path, as_json: bool) -> None:
    """Measures a run's peak again, and reads the run again with it."""
    from kit.measure.site import remeasure
    from kit.run import Run

    found = remeasure(Run.open(directory))
    metrics = Run.open(directory).metrics()
    mfu = metrics.summary().get("mfu")
    peaks = {dtype: new.to_dict() for dtype, (_, new) in found.items()}
    facts = {
        f"{dtype} peak, FLOP/s, before": str(old or "unknown") for dtype, (old, _) in found.items()
    }
    facts |= {f"{dtype} peak, FLOP/s, now": str(new) for dtype, (_, new) in found.items()}
    facts["MFU, last 20 steps"] = (
        f"{mfu:.1%}" if mfu is not None else f"none: {metrics.why_no_mfu or 'no step'}"
    )
    record = {"peak_flops_per_s": peaks, "mfu": mfu, "why_no_mfu": metrics.why_no_mfu}
    tell(record, as_json, facts_table(str(directory), facts.items()))


@app.command()
def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="also train a step with DeepSpeed; up to a minute")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what this machine has of what the kit can use, and how to get the rest."""
    from kit.doctor import examine

    findings = examine(deep=deep)
    mark = {True: Text("✔", style="green"), False: Text("✖", style="red"), None: Text("–")}
    rows = [(mark[f.ok], f.subject, f.found, Text(f.advice, style="dim")) for f in findings]
    table = Table("", "", "found", "advice", title="This machine", rows=rows)
    tell([dataclasses.asdict(finding) for finding in findings], as_json, table)
    raise typer.Exit(code=1 if any(finding.ok is False for finding in findings) else 0)


def _check_out(out: Path) -> None:
    if out.suffix != ".json":
        raise ConfigError(f"--out {out}: not a .json file. Give a name that ends in .json.")
    if out.exists():
        raise ConfigError(
            f"--out {out}: is there already, and may be a run's. Give a new file, NAME.json."
        )


def _choices(settings: list[str]) -> dict[str, list[Any]]:
    """Returns {"schedule": ["1f1b"], "tensor_parallel": [4, 8]} from `name=value,value`."""
    choices: dict[str, list[Any]] = {}
    for setting in settings:
        name, _, values = setting.partition("=")
        words = {"true": True, "false": False}
        choices[name] = [
            int(v) if v.isdigit() else words.get(v.lower(), v) for v in values.split(",")
        ]
    return choices
