"""Entry point of the command line, for `kit` and `python -m kit`. Its commands are in `kit.cli`."""

import gc
import io
import sys


def main() -> None:
    """Runs the command line. A character that the terminal cannot show is printed as an escape
    sequence with its number.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        # The import is inside `try`, since it takes a third of a second, in which Ctrl-C may come.
        from kit.cli.app import (
            run,
        )

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # As in a shell: 128 + SIGINT.
    except ImportError as error:
        sys.exit(broken_environment(error))
    except Exception as error:
        from cluster.shadows import explain
        from kit.show.terminal import PlainStream

        explain(error)
        sys.stderr = PlainStream(sys.stderr)  # Python prints the error after this function.
        raise
    finally:
        # At its end, Python would otherwise search all objects of torch for cycles for 0.9 s.
        gc.freeze()


def broken_environment(error: ImportError) -> int:
    """Prints that the packages of the command line cannot be imported, and which modules from
    folders of the user may be the reason. `kit doctor` prints nothing more in this case. Returns
    the exit code 1.

    Raises:
        ImportError: No module is shadowed. `error` is raised again, since its traceback is useful.
            For `kit doctor` it is not raised.
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
