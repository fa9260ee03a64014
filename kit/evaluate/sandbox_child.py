"""What the isolated process runs: limits itself, then a program and its test. Standard library
only, never imported.

Arguments: the file descriptor of the result, and that of a secret. Standard input: a JSON object
with `limits`, `program` and `test`. The result is the secret, read only after the last line of the
test, or `error: <type>`; a program that ends the process, or writes what a result looks like, has
not read the secret.
"""

import ctypes
import json
import os
import resource
import struct
import sys

UNSHARE = {"x86_64": (0xC000003E, 272), "aarch64": (0xC00000B7, 97)}
"""The kernel's name for a machine (linux/audit.h), and its number of the system call that makes
namespaces."""


def main() -> None:
    """Runs the request on standard input and writes its result."""
    result = int(sys.argv[1])
    secret = int(sys.argv[2])
    write = os.write
    read = os.read
    leave = os._exit
    # The program may replace the functions of these names.
    build = compile
    run = exec
    request = json.load(sys.stdin)
    for name, value in request["limits"].items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))
    forbid_namespaces()
    sys.argv = [""]
    sys.stdin = open(os.devnull) if os.path.exists(os.devnull) else None
    names = {"__name__": "program"}
    try:
        run(build(request["program"], "program", "exec"), names)
        run(build(request["test"], "test", "exec"), names)
    # SystemExit and KeyboardInterrupt too: the test did not reach its end.
    except BaseException as error:
        write(result, f"error: {type(error).__name__}"[:80].encode())
        leave(1)
    write(result, read(secret, 64))
    leave(0)  # without what the program registered for the exit of Python


def forbid_namespaces() -> None:
    """Has Linux refuse new namespaces to this process, where it knows how: they open much of the
    kernel to a program.

    A filter of system calls (linux/seccomp.h, linux/filter.h); those of another machine's numbers
    are refused too. A clone with namespaces is a fork, of which none is allowed.
    """
    if sys.platform != "linux" or (machine := os.uname().machine) not in UNSHARE:
        return
    arch, unshare = UNSHARE[machine]
    load = 0x20
    equal = 0x15
    at_least = 0x35
    end = 0x06
    steps = [
        (load, 0, 0, 4),
        (equal, 0, 4, arch),
        (load, 0, 0, 0),
        (at_least, 2, 0, 1 << 30),
        (equal, 1, 0, unshare),
    ]
    steps += [(end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x00050001)]  # allowed; EPERM
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    told = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    zero = ctypes.c_ulong(0)
    prctl(38, ctypes.c_ulong(1), zero, zero, zero)  # PR_SET_NO_NEW_PRIVS
    prctl(22, ctypes.c_ulong(2), told)  # PR_SET_SECCOMP


main()
