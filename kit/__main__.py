"""Entry point of the command line, for `kit` and `python -m kit`. The commands are in `kit.cli`."""

import gc
import io
import sys


def main() -> None:
    """Runs the command line. A character that the encoding of the terminal cannot represent is
    printed as an escape sequence with the character's code point.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        # The import takes a third of a second, in which the user may press Ctrl-C. Therefore it is
        # inside `try`.
        from kit.cli.app import (
            run,
        )

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # The exit code of a shell for SIGINT is 128 + 2.
    except ImportError as error:
        sys.exit(broken_environment(error))
    except Exception as error:
        from cluster.shadows import explain

        explain(error)
        _keep_stderr_plain()
        raise
    finally:
        # Without this call, Python would search all objects of torch for reference cycles at its
        # exit, for 0.9 s.
        gc.freeze()


def _keep_stderr_plain() -> None:
    """Wraps standard error in a PlainStream for the traceback of an uncaught exception. Python
    prints it after `main` has returned. Does nothing if an import fails in a broken environment.
    """
    try:
        from kit.show.terminal import PlainStream
    except Exception:
        return
    sys.stderr = PlainStream(sys.stderr)


def broken_environment(error: ImportError) -> int:
    """Prints that packages of the command line cannot be imported. If modules in the user's own
    folders hide installed modules, it names them as a possible reason. Returns the exit code 1.
    `kit doctor` prints nothing else in this case.

    Raises:
        ImportError: No installed module is hidden. `error` is raised again, so that the user sees
            its traceback. For `kit doctor` it is not raised.
    """
    from cluster.shadows import find_shadowing_modules, summary

    shadows = find_shadowing_modules()
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
