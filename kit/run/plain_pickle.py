"""Checks pickled bytes before they are loaded. The time and memory that loading takes are then at
most proportional to the number of bytes.

Without the check, a few bytes can exhaust a machine. A memo index of 2^31 reserves 32 GiB. Tuples
that are nested in forty levels, each containing the next one twice, need 2^40 steps for a hash. If
n keys of a dictionary have equal hashes, loading takes n^2 steps.
"""

import pickle

LONGEST_INT_BYTES = 7
"""Largest allowed size of an integer in bytes. An integer below 2^61 - 1 is its own hash, so no two
such integers have equal hashes. File offsets and counts are below 2^55."""
MOST_SHARED_TUPLES = 8
"""Largest allowed number of times that a tuple is loaded from the memo. Each use at most doubles
the time of a hash."""
TUPLES = frozenset(b"t\x85\x86\x87")
"""Opcodes (instructions of a pickle) that create a tuple."""
MADE = TUPLES | frozenset(b")]}\x8f\x91\x81\x92R\x93cXTBU\x8c\x8d\x8eC\x8aGQ")
"""Opcodes that leave a new object on the stack. An object may be stored in the memo only directly
after one of these opcodes."""
WITHOUT_ARGUMENT = b"(.N\x88\x89)]}taesub\x85\x86\x87\x81\x92R\x93\x8f\x90\x91Q\x94"
SIZES = dict.fromkeys(WITHOUT_ARGUMENT, 0)
SIZES |= {ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("G"): 8, 0x80: 1, 0x95: 8}
"""Number of bytes of the argument, by opcode. It contains all opcodes whose argument has a fixed
size and that have no special rule in `check_pickle`."""
TEXTS = {ord("U"): 1, 0x8C: 1, ord("C"): 1, ord("X"): 4, ord("T"): 4, ord("B"): 4, 0x8D: 8, 0x8E: 8}
"""Number of bytes of the field that holds the length, by opcode. It contains the opcodes of texts
and of bytes."""
PUTS = {ord("q"): 1, ord("r"): 4}
GETS = {ord("h"): 1, ord("j"): 4}
"""PUTS are the opcodes that store an object in the memo, and GETS those that load an object from
the memo. The value is the number of bytes of the memo index."""
MEMOIZE = 0x94
GLOBAL = ord("c")
LONG1 = 0x8A


def check_pickle(data: bytes) -> None:  # noqa: C901 - one flat case per kind of opcode
    """Checks pickled bytes of protocols 2 to 5. Takes about a microsecond per 10 bytes.

    Raises:
        pickle.UnpicklingError: An opcode, a memo index, a number or the sharing of tuples could
            make loading take time or memory out of proportion to the size of the data.
    """
    sizes = SIZES
    tuples = set[int]()
    place = before = stored = shared = 0
    while place < len(data):
        opcode = data[place]
        place += 1
        if opcode in sizes:
            if opcode == MEMOIZE:
                _check_stored(before, place)
                if before in TUPLES:
                    tuples.add(stored)
                stored += 1
            place += sizes[opcode]
        elif opcode in GETS:
            end = place + GETS[opcode]
            shared += int.from_bytes(data[place:end], "little") in tuples
            if shared > MOST_SHARED_TUPLES:
                raise pickle.UnpicklingError(f"it uses {shared} tuples more than once")
            place = end
        elif opcode in TEXTS:
            end = place + TEXTS[opcode]
            place = end + int.from_bytes(data[place:end], "little")
        elif opcode in PUTS:
            _check_stored(before, place)
            end = place + PUTS[opcode]
            if int.from_bytes(data[place:end], "little") != stored:
                raise pickle.UnpicklingError(f"memo index out of order at byte {place}")
            if before in TUPLES:
                tuples.add(stored)
            stored += 1
            place = end
        elif opcode == LONG1 and data[place : place + 1] <= bytes([LONGEST_INT_BYTES]):
            place += 1 + int.from_bytes(data[place : place + 1], "little")
        elif opcode == GLOBAL:
            for _ in ("module", "name"):
                place = data.find(b"\n", place) + 1 or len(data)
        else:
            raise pickle.UnpicklingError(f"opcode {opcode:#04x} at byte {place - 1} is not allowed")
        before = opcode
    if place > len(data):  # If bytes are missing, loading would reserve memory for them.
        raise pickle.UnpicklingError(f"it ends at byte {len(data)}, within an argument")


def _check_stored(before: int, place: int) -> None:
    """Raises UnpicklingError unless the previous opcode, `before`, has created a new object, which
    is now stored in the memo. `place` is the position in bytes, which the message reports.
    """
    if before not in MADE:
        raise pickle.UnpicklingError(f"an object is stored a second time at byte {place}")
