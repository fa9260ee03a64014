"""A check of pickled bytes before they are loaded: time and memory of loading then grow in
proportion to the number of bytes.

Without the check a few bytes are enough to use up a machine. A memo index of 2^31 reserves 32 GiB.
A tuple that holds another tuple twice, in forty levels, needs 2^40 steps for its hash. If n keys of
a table have equal hashes, the loading takes n^2 steps.
"""

import pickle

LONGEST_INT_BYTES = 7
"""Largest size of a whole number in bytes. Below 2^61 - 1 a number is its own hash, so no two
numbers have equal hashes. File offsets and counts stay below 2^55."""
MOST_SHARED_TUPLES = 8
"""Largest number of uses of tuples from the memo. Each use at most doubles the time of a hash."""
TUPLES = frozenset(b"t\x85\x86\x87")
"""Opcodes that create a tuple."""
MADE = TUPLES | frozenset(b")]}\x8f\x91\x81\x92R\x93cXTBU\x8c\x8d\x8eC\x8aGQ")
"""Opcodes that leave a new object on the stack. Only such an object is stored in the memo."""
WITHOUT_ARGUMENT = b"(.N\x88\x89)]}taesub\x85\x86\x87\x81\x92R\x93\x8f\x90\x91Q\x94"
SIZES = dict.fromkeys(WITHOUT_ARGUMENT, 0)
SIZES |= {ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("G"): 8, 0x80: 1, 0x95: 8}
"""Size of the argument in bytes, for each opcode with an argument of fixed size and no special
rule in `check_pickle`."""
TEXTS = {ord("U"): 1, 0x8C: 1, ord("C"): 1, ord("X"): 4, ord("T"): 4, ord("B"): 4, 0x8D: 8, 0x8E: 8}
"""Size in bytes of the length field, for each opcode of a text or of bytes."""
PUTS = {ord("q"): 1, ord("r"): 4}
GETS = {ord("h"): 1, ord("j"): 4}
"""Size in bytes of the memo index. PUTS: opcodes that store an object in the memo. GETS: opcodes
that load an object from the memo."""
MEMOIZE = 0x94
GLOBAL = ord("c")
LONG1 = 0x8A


def check_pickle(data: bytes) -> None:  # noqa: C901 - one flat case per kind of opcode
    """Checks pickled bytes as protocols 2 to 5 write them. Takes about a microsecond for 10 bytes.

    Raises:
        pickle.UnpicklingError: An opcode, a memo index, a number or the sharing of tuples could
            take time or memory out of proportion to the size of the data.
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
    if place > len(data):  # Loading would reserve memory for what is missing.
        raise pickle.UnpicklingError(f"it ends at byte {len(data)}, within an argument")


def _check_stored(before: int, place: int) -> None:
    """Raises UnpicklingError unless the previous opcode, `before`, has created the object that is
    stored in the memo. `place` is the position in bytes, for the message.
    """
    if before not in MADE:
        raise pickle.UnpicklingError(f"an object is stored a second time at byte {place}")
