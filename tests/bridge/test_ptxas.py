"""The tool that made machine code is read from the code itself; code that does not say is refused with what it has."""

import os
import struct
import sys
from pathlib import Path

import pytest

from bridge.ptxas import Tool, compiled_by, tool_of
from contracts.errors import ToolchainMismatch

TEXTS = (
    b"NVIDIA Corp",
    b"ptxas",
    b"Cuda compilation tools, release 13.0, V13.0.88",
    b"Build cuda_13.0",
    b"-arch sm_90a",
)


def _elf(sections: dict[bytes, bytes]) -> bytes:
    """An ELF file of 64 bits with these sections and one of their names."""
    names = b"\0" + b"\0".join([*sections, b".shstrtab"]) + b"\0"
    contents = [b"", *sections.values(), names]
    starts = [0, *(names.index(b"\0" + name + b"\0") + 1 for name in (*sections, b".shstrtab"))]
    body, headers, at = b"", b"", 64
    for start, content in zip(starts, contents, strict=True):
        headers += struct.pack("<IIQQQQIIQQ", start, 7, 0, 0, at, len(content), 0, 0, 4, 0)
        body += content
        at += len(content)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    # Flags, then sizes and counts: this header, program headers, section headers, and which section holds the names.
    counts = (0, 64, 0, 0, 64, len(contents), len(contents) - 1)
    return ident + struct.pack("<HHIQQQI6H", 2, 190, 1, 0, 0, at, *counts) + body + headers


def _note(texts=TEXTS) -> bytes:
    return struct.pack("<III", 12, 140, 1) + b"\0\1\0\0".join(texts) + b"\0"


def test_machine_code_names_its_tool_and_version():
    code = _elf({b".text.kernel": b"Cuda compilation tools, release 1.0, V1.0.1", b".note.nv.tkinfo": _note()})
    assert tool_of(code) == Tool("ptxas", "13.0.88")
    assert str(tool_of(code)) == "ptxas 13.0.88"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (b"", "0 bytes without"),
        (b"\x7fELF\x02" + bytes(59), "64 bytes without"),
        (_elf({b".text.kernel": b"x"}), r"without a section .*\.text\.kernel"),
        (_elf({b".note.nv.tkinfo": _note(TEXTS[:2])}), "that says .*ptxas"),
    ],
)
def test_code_that_does_not_name_its_tool_is_refused_with_what_it_has(code, said):
    with pytest.raises(ToolchainMismatch, match=said):
        tool_of(code)


def _compiling(dumps: Path, *codes: bytes):
    """What the plugin does while the variable is set: text for people in one place, the code in another."""

    def compile_one() -> None:
        texts = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
        (texts / "kernel.ptx").write_text(".version 9.0")
        for number, code in enumerate(codes):
            folder = dumps / f"mosaic-gpu-{number}"
            folder.mkdir()
            (folder / "kernel.bin").write_bytes(code)

    return compile_one


def test_the_dumps_of_one_compilation_are_read_and_every_folder_is_left(tmp_path, monkeypatch):
    """Which of the new ones are another process's can't be seen, so none is removed."""
    monkeypatch.delenv("MOSAIC_GPU_DUMP_TO", raising=False)
    (tmp_path / "mosaic-gpu-old").mkdir()
    (tmp_path / "mosaic-gpu-old" / "kernel.bin").write_bytes(b"another process's")
    code = _elf({b".note.nv.tkinfo": _note()})
    assert compiled_by(_compiling(tmp_path, code, code), tmp_path) == Tool("ptxas", "13.0.88")
    left = {path.parent.name: path.read_bytes() for path in tmp_path.glob("*/kernel.bin")}
    assert left == {"mosaic-gpu-old": b"another process's", "mosaic-gpu-0": code, "mosaic-gpu-1": code}
    assert "MOSAIC_GPU_DUMP_TO" not in os.environ


def test_the_dump_of_another_user_is_not_read(tmp_path, monkeypatch):
    compile_one = _compiling(tmp_path, b"nobody's")
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(ToolchainMismatch, match="0 dumps of machine code"):
        compiled_by(compile_one, tmp_path)


def test_no_dump_or_two_that_disagree_are_refused(tmp_path):
    with pytest.raises(ToolchainMismatch, match=r"0 dumps of machine code; other dumps: \['kernel.ptx'\]"):
        compiled_by(_compiling(tmp_path), tmp_path)
    other = tuple(text.replace(b"13.0.88", b"12.9.86") for text in TEXTS)
    codes = (_elf({b".note.nv.tkinfo": _note()}), _elf({b".note.nv.tkinfo": _note(other)}))
    with pytest.raises(ToolchainMismatch, match=r"12\.9\.86.*13\.0\.88"):
        compiled_by(_compiling(tmp_path, *codes), tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file of this machine")
def test_an_ordinary_program_names_no_tool_but_its_sections_are_read():
    with pytest.raises(ToolchainMismatch, match=r"\.text"):
        tool_of(Path(sys.executable).resolve().read_bytes())
