"""The command line, as `kit` and as `python -m kit`; its commands are in `kit.commands`."""

import gc
import io
import sys


def main() -> None:
    """Runs the command line; a character that the terminal lacks is printed by its number."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        # here, since Ctrl-C may come while a third of a second is spent on imports.
        from kit.commands.app import (
            run,
        )

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # as of a shell: 128 + SIGINT
    finally:
        # else Python, before it ends, looks for cycles in all of torch: the user would wait 0.9 s
        gc.freeze()


if __name__ == "__main__":
    main()
