"""Script of the isolated process: limits its own resources, then runs a program and its test.

Imports the standard library only. The file is passed to `python -c` as text and is never imported.

Arguments: the file descriptor for the result, and the file descriptor from which a secret is read.
Standard input: a JSON object with `limits`, `program` and `test`.

The result is the secret, or `error: TYPE` after an exception. The secret is read only after the
last line of the test. A program that ends the process, or writes text that looks like a result, has
not read the secret and does not pass.
"""

import ctypes
import json
import os
import resource
import struct
import sys

UNSHARE = {"x86_64": (0xC000003E, 272), "aarch64": (0xC00000B7, 97)}
"""Dict from machine name to (architecture number of linux/audit.h, number of the system call
`unshare`, which creates namespaces)."""


def main() -> None:
    """Runs the request on standard input and writes its result."""
    result = int(sys.argv[1])
    secret = int(sys.argv[2])
    write = os.write
    read = os.read
    leave = os._exit
    # The functions are bound to local names, because the program may replace them in their modules.
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
    # BaseException includes SystemExit and KeyboardInterrupt, with which the test does not reach
    # its end.
    except BaseException as error:
        write(result, f"error: {type(error).__name__}"[:80].encode())
        leave(1)
    write(result, read(secret, 64))
    leave(0)  # os._exit skips the exit handlers that the program registered.


def forbid_namespaces() -> None:
    """Makes Linux refuse new namespaces to this process, on the machines in UNSHARE. Namespaces
    give a program access to much of the kernel.

    Installs a filter of system calls (linux/seccomp.h, linux/filter.h). The filter also refuses
    system calls that are numbered as on another machine. `clone` with namespaces needs no rule: it
    is a fork, and the limits allow no forks.
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
    steps += [
        (end, 0, 0, 0x7FFF0000),
        (end, 0, 0, 0x00050001),
    ]  # Allows the call, or fails with EPERM.
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    told = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    zero = ctypes.c_ulong(0)
    prctl(38, ctypes.c_ulong(1), zero, zero, zero)  # PR_SET_NO_NEW_PRIVS
    prctl(22, ctypes.c_ulong(2), told)  # PR_SET_SECCOMP


main()
