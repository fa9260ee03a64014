"""The command line: every button of the notebooks has a twin here. `kit --help` lists them."""

import sys

import typer
from rich.text import Text

from cluster.state import JobError
from kit.commands import convert, data, estimates, launching, monitor, papers, runs, scores
from kit.errors import ConfigError, DataError, MissingPackageError, RunError
from kit.terminal import PlainConsole

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
for part in (launching, runs, monitor, estimates, data, scores, convert, papers):
    app.add_typer(part.app)


def main() -> None:
    """Runs the command line; an error that the user can mend is told without a traceback."""
    try:
        app(standalone_mode=True)
    except (ConfigError, DataError, RunError, JobError, MissingPackageError) as error:
        PlainConsole(stderr=True).print(Text.assemble((f"{type(error).__name__}: ", "red"), str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
