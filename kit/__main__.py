"""The command line, as `kit` and as `python -m kit`; its commands are in `kit.cli`."""

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
        from kit.cli.app import (
            run,
        )

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # as of a shell: 128 + SIGINT
    except ImportError as error:
        sys.exit(broken_environment(error))
    except Exception as error:
        from cluster.shadows import explain
        from kit.show.terminal import PlainStream

        explain(error)
        sys.stderr = PlainStream(sys.stderr)  # Python prints the error after this function.
        raise
    finally:
        # else Python, before it ends, looks for cycles in all of torch: the user would wait 0.9 s
        gc.freeze()


def broken_environment(error: ImportError) -> int:
    """Reports that the packages of the command line cannot be imported, and which modules of the
    user's environment may be the reason. For `kit doctor` this is the whole report.

    Raises:
        ImportError: again, if no module is shadowed, since its traceback is then of use.
    """
    from cluster.shadows import find_shadows, summary

    shadows = find_shadows()
    is_doctor = "doctor" in sys.argv[1:]
    if not shadows and not is_doctor:
        error.add_note("`kit doctor` examines this environment.")
        raise error
    print(f"ImportError: {error}", file=sys.stderr)
    for line in summary(shadows).splitlines():
        print(f"✖ {line}.", file=sys.stderr)
    if shadows:
        print(f"{shadows[0].advice}. Then `kit doctor` examines the rest.", file=sys.stderr)
    else:
        print(f"✖ {sys.prefix} lacks a package or has a damaged one.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
