"""What the isolated process runs: limits itself, then a program and its test. Standard library only, never imported.

Arguments: the file descriptor of the result, and that of a secret. Standard input: a JSON object with `limits`,
`program` and `test`. The result is the secret, read only after the last line of the test, or `error: <type>`; a program
that ends the process, or writes what a result looks like, has not read the secret.
"""

import json
import os
import resource
import sys


def main() -> None:
    """Runs the request on standard input and writes its result."""
    result, secret, write, read, leave = int(sys.argv[1]), int(sys.argv[2]), os.write, os.read, os._exit
    build, run = compile, exec  # the program may put others in their place
    request = json.load(sys.stdin)
    for name, value in request["limits"].items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    sys.argv, sys.stdin = [""], open(os.devnull) if os.path.exists(os.devnull) else None
    names = {"__name__": "program"}
    try:
        run(build(request["program"], "program", "exec"), names)
        run(build(request["test"], "test", "exec"), names)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the test did not come to its end
        write(result, f"error: {type(error).__name__}"[:80].encode())
        leave(1)
    write(result, read(secret, 64))
    leave(0)  # nothing that the program left behind runs


main()
