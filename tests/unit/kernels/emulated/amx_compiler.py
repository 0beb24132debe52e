#!/usr/bin/env python3
"""g++ for processors with AVX-512 but no AMX: the instructions that they lack are functions of `tiles.h`.

Kitae compiles its kernels with what `CXX` names. Sources are copied, and there each instruction becomes a call.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
REPLACED = [
    (r'asm volatile\("tileloadd.*?"memory"\)', "emulated::load(tile, address, stride)"),
    (r'asm volatile\("tilestored.*?"memory"\)', "emulated::store(tile, address, stride)"),
    (r'asm volatile\("tilezero[^)]*\)', "emulated::zero(tile)"),
    (r'asm volatile\("tdpbf16ps[^)]*\)', "emulated::product(out, left, right)"),
    (r'asm volatile\("ldtilecfg[^;]*;', "emulated::configure(&setting);"),
    (r'asm volatile\("tilerelease[^;]*;', ""),
    (r"_mm512_cvtneps_pbh\(", "emulated::round16("),
    (r"_mm512_dpbf16_ps\(([^,]+), ([^,]+), ([^)]+)\)", r"emulated::dot(\1, (__m512i)\2, (__m512i)\3)"),
    (r"return syscall\([^;]*;", "return 1;"),
]


def main(arguments: list[str]) -> int:
    if "--version" in arguments:  # which the kernels are kept under
        print((HERE / "tiles.h").read_text(), REPLACED)
        return subprocess.call(["g++", "--version"])
    source = next(Path(a) for a in arguments if a.endswith(".cpp"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in (p for p in source.parent.iterdir() if p.suffix in (".h", ".cpp")):
            text = path.read_text()
            for old, new in REPLACED if path.name == "amx.h" else ():
                text, count = re.subn(old, new, text)
                assert count, f"{path.name} has no {old}"
            assert "asm volatile" not in text or path.name != "amx.h"
            (folder / path.name).write_text(text)
        shutil.copy(HERE / "tiles.h", folder)
        rest = [str(folder / source.name) if a == str(source) else a for a in arguments]
        has = ["-mamx-tile", "-mamx-bf16", "-mavx512bf16", "-include", str(folder / "tiles.h")]
        return subprocess.call(["g++", *rest, *has])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
