"""Where the kernels of a CPU cannot be built, plain torch goes on and says why; who may share what was built."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from kitae.kernels.cpu import compile_cpp

X86 = """processor : {0}
model name : Xeon
cpu MHz : 250{0}.000
flags : sse2 {1}
"""
ARM = """processor : {0}
BogoMIPS : 243.75
Features : fp asimd {1}
CPU part : {2}
"""


def no_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))


def broken_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    compiler = folder / "c++"
    compiler.write_text("#!/bin/sh\ncase $1 in --version) ;; *) echo 'no such thing' >&2; exit 1 ;; esac\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def no_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("KITAE_CACHE", str(folder / "file"))


def no_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Of a number without a name, as containers have it."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KITAE_CACHE")
    monkeypatch.setattr(Path, "home", home)


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        (no_compiler, "no C++ compiler found"),
        (broken_compiler, "could not be built, the engine uses plain torch: no such thing"),
        (no_folder, "file/kernels' (KITAE_CACHE chooses the folder"),
        (no_home, "determine home directory. (KITAE_CACHE chooses the folder"),
    ],
)
def test_what_is_lacking_is_said_and_nothing_fails(
    lacks: Callable[[pytest.MonkeyPatch, Path], None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("KITAE_CACHE", str(tmp_path / "cache"))
    lacks(monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING, "kitae"):
        assert compile_cpp.cpu_library.__wrapped__() is None
    assert said in caplog.text


def told(tmp_path: Path, text: str) -> str:
    (tmp_path / "cpuinfo").write_text(text)
    return compile_cpp._processor(tmp_path / "cpuinfo")


def test_processors_that_can_do_other_things_share_no_kernels(tmp_path: Path) -> None:
    kinds = [X86.format(0, ""), X86.format(0, "avx2"), ARM.format(0, "", "0xd0c"), ARM.format(0, "sve", "0xd40")]
    assert len({told(tmp_path, text) for text in kinds}) == len(kinds)


def test_cores_of_one_kind_share_them(tmp_path: Path) -> None:
    for kind in (lambda core: X86.format(core, "avx2"), lambda core: ARM.format(core, "sve", "0xd40")):
        assert told(tmp_path, kind(0)) == told(tmp_path, kind(1)) == told(tmp_path, kind(0) + kind(1))


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert isinstance(compile_cpp._processor(tmp_path / "nothing"), str)
