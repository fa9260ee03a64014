"""Commands on site files: site init."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cluster.files import write_atomic
from cluster.login.connection import ssh
from cluster.record import ConfigError, counted
from cluster.scheduler import EDIT
from cluster.site import Site
from cluster.slurm import inventory
from cluster.state import JobError
from kit.commands.options import hint
from kit.plan import Plan
from kit.show.terminal import PlainConsole

app = typer.Typer()
site_app = typer.Typer(no_args_is_help=True)
app.add_typer(site_app, name="site", help="Write site files: site init.")
TIMEOUT_S = 60.0
"""Of one question."""
LOCAL = """\
# This machine, as torch sees it.
# EDIT: peaks and links, by `kit bench --out FILE.toml` or from a data sheet
"""


@site_app.command()
def init(
    out: Annotated[Path, typer.Argument(help="File to write, NAME.toml.", metavar="FILE")],
    partition: Annotated[
        str | None, typer.Option(help="Partition of Slurm. Default: one with GPUs.")
    ] = None,
    login: Annotated[
        str | None, typer.Option(help="Login node to ask: a name of ~/.ssh/config.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="Account that jobs are charged to.")] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Describe this machine alone: its GPUs, or its cores.")
    ] = False,
) -> None:
    """Write a first site file from what a cluster or this machine says, with EDIT where it cannot
    know.
    """
    if out.suffix != ".toml" or out.exists():
        raise ConfigError(
            f"{out}: {'is there already' if out.exists() else 'is no .toml'}. Give a new file,"
            " NAME.toml."
        )

    def ask(words: Sequence[str]) -> str:
        return (
            _run(words)
            if login is None
            else ssh(login, _in_a_login_shell(words), timeout_s=TIMEOUT_S).decode()
        )

    if local:
        given = {"--partition": partition, "--login": login, "--account": account}
        if unfit := [name for name, value in given.items() if value]:
            raise ConfigError(
                f"{unfit[0]}: not with --local, which asks no Slurm. Leave one of them out."
            )
        from kit.measure.device import on_device
        from kit.measure.site import to_toml

        here = on_device(Site.load("laptop"), Plan()).replace(
            name=os.uname().nodename.partition(".")[0]
        )
        _finish(out, LOCAL + to_toml(here))
        return
    found = inventory.nodes_of(ask(inventory.SINFO))
    if not found:
        raise JobError(
            "sinfo names no nodes here. Are you on a login node of the cluster? Or give --login"
            " NAME."
        )
    nodes = inventory.choose(found, partition)
    others = sorted({each["partition"] for each in found} - {nodes["partition"]})
    text = inventory.site_text(
        nodes, inventory.settings_of(ask(inventory.CONFIG)), login=login, account=account
    )
    _finish(out, text, others)


def _finish(out: Path, text: str, others: Sequence[str] = ()) -> None:
    """Writes a site file and says what is left to do."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, text)
    site = Site.load(str(out))
    console = PlainConsole(soft_wrap=True)
    console.print(
        f"{out}: {site.description}"
        + (f". Other partitions: {', '.join(others)}" if others else "")
    )
    left = [
        f"  {out}, line {n}: {line}"
        for n, line in enumerate(text.splitlines(), start=1)
        if f"{EDIT}:" in line
    ]
    then = f"Edit {counted(len(left), 'line')} of it, as below. Then look" if left else "Look"
    hint(f"{then} at a job of it:", "launch", "runs/first", "--site", out, "--show")
    for line in left:
        console.print(line)


def _in_a_login_shell(words: Sequence[str]) -> str:
    return f"bash -lc {shlex.quote(shlex.join(words))}"


def _run(words: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise JobError(
            f"{words[0]} is not here, so this is no machine with Slurm. Run this on a login node,"
            " or give --login NAME; this machine alone is site laptop, which needs no file, or"
            " --local, which makes one."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise JobError(f"`{shlex.join(words)}` did not answer within {TIMEOUT_S:g} s.") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise JobError(f"`{shlex.join(words)}`: exit code {done.returncode}: {last}")
    return done.stdout
