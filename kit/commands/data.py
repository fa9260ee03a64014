"""Commands on text: data build."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import cluster
from cluster.attempts import refuse_live
from cluster.job import JobSpec
from cluster.record import counted
from cluster.site import Site
from kit.commands.options import JsonOption, MinutesOption, facts_table, hint, tell
from kit.errors import ConfigError

app = typer.Typer()
data_app = typer.Typer(no_args_is_help=True)
app.add_typer(data_app, name="data", help="Build token files, and look at them.")


@data_app.command("build")
def data_build(
    out: Annotated[Path, typer.Argument(help="folder to make")],
    source: Annotated[
        list[Path] | None,
        typer.Option(
            help=".txt (each one document), .jsonl(.gz, .zst), .parquet, or a folder of them; default: Python's texts"
        ),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json, .model or folder; default: train one")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="of a trained tokenizer; default 4096")] = None,
    max_megabytes: Annotated[float | None, typer.Option(help="of text to read")] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="of the documents, held out whole; of one larger than that, its end")
    ] = 0.02,
    text_key: Annotated[str, typer.Option(help="key of a .jsonl object, or column of a table")] = "text",
    skip_corrupt: Annotated[
        bool, typer.Option("--skip-corrupt", help="leave out what cannot be read, named in dataset.json")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace another dataset in that folder")] = False,
    workers: Annotated[
        int | None, typer.Option(help="processes, with --site of each rank; default: one for each core")
    ] = None,
    site: Annotated[str | None, typer.Option(help="build in a job: a name or a .toml file")] = None,
    nodes: Annotated[int, typer.Option(help="of the site, which share the files out")] = 1,
    minutes: MinutesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Turn text into token files for training. What was killed goes on where it was, by the same command."""
    from kit.data.build import Progress, build_dataset, prepared

    if max_megabytes is not None and not 0 < max_megabytes < 1e12:
        raise ConfigError(f"--max-megabytes {max_megabytes:g}: not allowed. Give a number above 0.")
    asked: dict[str, Any] = {
        "sources": source, "tokenizer": tokenizer, "vocab_size": vocab_size, "seed": 1234,
        "max_bytes": None if max_megabytes is None else int(max_megabytes * 1e6), "text_key": text_key,
        "validation_fraction": validation_fraction, "skip_corrupt": skip_corrupt, "overwrite": overwrite,
        "workers": workers,
    }  # fmt: skip
    if site is not None:
        place = _building_site(site, source, tokenizer)
        cores = place.slurm.cpus_per_task if place.slurm and place.slurm.launcher == "srun" else None
        asked["workers"] = workers or cores or 1
        run = out.with_name(f"{out.name}-build").absolute()
        if (run / "state.json").exists():
            refuse_live(run)
        with prepared(out, Progress(shown=not as_json), **asked) as folder:
            if folder is not None:
                _submit(run, folder, place, nodes, minutes)
                return
    dataset = build_dataset(out, progress=not as_json, **asked)
    tell(dataset.info.to_dict(), as_json, facts_table(str(out), dataset.facts()))


def _building_site(name: str, source: list[Path] | None, tokenizer: str | None) -> Site:
    """Returns a site whose job can build a dataset, or raises ConfigError."""
    site = Site.load(name)
    if site.scheduler == "local":
        raise ConfigError(f"--site {name}: this machine alone. Leave it out and give --workers.")
    if site.login is not None:
        raise ConfigError(f"--site {name}: its files lie behind a login node. Give this command there.")
    if not source or not tokenizer:
        raise ConfigError("--site: give --source, and --tokenizer: one trained by a build of a sample of the text.")
    return site


def _submit(run: Path, folder: Path, site: Site, nodes: int, minutes: float | None) -> None:
    job = JobSpec(
        name=run.name, run_dir=str(run), argv=(sys.executable, "-m", "kit.data", str(folder)),
        num_processes=nodes * site.devices_per_node, num_nodes=nodes,
        time_limit_s=None if minutes is None else 60 * minutes,
        max_restarts=10,  # time limits too: a build takes no steps, by which progress would be seen
    )  # fmt: skip
    cluster.submit(job, site)
    told = f"Started {counted(job.num_processes, 'rank')}; should it end early, give this again. Watch:"
    hint(told, "logs", run, "--follow")
