"""Commands on estimates: plan, validate, calibrate."""

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from kit.commands.options import JsonOption, console

app = typer.Typer()


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="preset, or a spec.json", metavar="MODEL")],
    site: Annotated[str, typer.Option(help="the machine: a name or a .toml file")],
    devices: Annotated[int, typer.Option(help="how many; all are used")],
    batch: Annotated[int, typer.Option(help="sequences in one optimizer step")],
    tokens: Annotated[float | None, typer.Option(help="training budget, for days and price, e.g. 1.8e12")] = None,
    max_risk: Annotated[float, typer.Option(help="highest accepted probability of running out of memory")] = 0.05,
    count: Annotated[int, typer.Option(help="layouts to show")] = 5,
    only: Annotated[list[str] | None, typer.Option(help="field=value,value: e.g. schedule=1f1b,interleaved")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest layout of a model on a machine, and say why it is."""
    from kit.estimate.report import plan_report

    report = plan_report(
        model, site=site, devices=devices, batch=batch, tokens=tokens, max_risk=max_risk, count=count,
        only=_choices(only or []),
    )  # fmt: skip
    if as_json:
        print(json.dumps(report.to_dict()))
        return
    _print_table(report.title, report.header, report.rows)
    facts = Table.grid(padding=(0, 2, 0, 0))
    for label, text in report.facts:
        facts.add_row(f"[dim]{label}[/]", text)
    console().print(facts)


def _choices(settings: list[str]) -> dict[str, list[Any]]:
    """Returns {"schedule": ["1f1b"], "tensor_parallel": [4, 8]} from `name=value,value`."""
    choices: dict[str, list[Any]] = {}
    for setting in settings:
        name, _, values = setting.partition("=")
        choices[name] = [int(value) if value.isdigit() else _word(value) for value in values.split(",")]
    return choices


def _word(value: str) -> Any:
    return {"true": True, "false": False}.get(value.lower(), value)


def _print_table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    console().print(table)
