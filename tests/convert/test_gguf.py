"""GGUF blocks mean what llama.cpp's reference says, and damage is told."""

import struct
from pathlib import Path

import numpy as np
import pytest

from kit.convert.gguf import F32, Q4_1, Q8_0, GgufFile, dequantised
from kit.convert.smollm2 import FILE_NAME, load_smollm2
from kit.errors import DataError


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write(file: Path, kind: int, weights: bytes, shape: tuple[int, ...]) -> Path:
    """Writes a file with three facts and one weight `w`."""
    facts = text("general.name") + struct.pack("<I", 8) + text("tiny") + text("depth") + struct.pack("<II", 4, 7)
    facts += text("words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    entry = text("w") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + facts + entry
    file.write_bytes(head + b"\0" * (-len(head) % 32) + weights)
    return file


def test_blocks_are_scale_times_quantum_plus_minimum() -> None:
    quanta = np.arange(32) % 16
    packed = bytes(int(low | high << 4) for low, high in zip(quanta[:16], quanta[16:][::-1], strict=True))
    block = np.frombuffer(np.array([0.5, -1.25], "<f2").tobytes() + packed, np.uint8)[None]
    expected = 0.5 * np.concatenate((quanta[:16], quanta[16:][::-1])) - 1.25
    assert (dequantised(block, Q4_1) == expected).all()
    signed = np.arange(-16, 16, dtype=np.int8)
    block = np.frombuffer(np.array([0.25], "<f2").tobytes() + signed.tobytes(), np.uint8)[None]
    assert (dequantised(block, Q8_0) == 0.25 * signed).all()


def test_facts_and_weights_are_read(tmp_path: Path) -> None:
    values = np.arange(12, dtype="<f4").reshape(3, 4)
    gguf = GgufFile(write(tmp_path / "a.gguf", F32, values.tobytes(), (3, 4)))
    assert gguf.facts == {"general.name": "tiny", "depth": 7, "words": ["a", "bc"]}
    assert gguf.names() == ["w"] and (gguf.weight("w") == values).all()
    with pytest.raises(DataError, match="no weight 'v'"):
        gguf.weight("v")
    other = GgufFile(write(tmp_path / "b.gguf", 12, bytes(64), (2, 32)))
    with pytest.raises(DataError, match="ggml type 12; read here are F32, Q4_1 and Q8_0"):
        other.weight("w")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(DataError, match="not a GGUF file of version 3"):
        GgufFile(tmp_path / "x.gguf")
    with pytest.raises(DataError, match="no such file. Run `kit smollm2`"):
        load_smollm2(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(DataError, match="damaged, its sha256 is"):
        load_smollm2(tmp_path)
