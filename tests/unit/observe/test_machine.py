"""What a run says of its machine."""

import os
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from kitae.observe.machine import FILE, machine_of, note_machine, this_machine


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert machine_of(tmp_path) is None
    note_machine(tmp_path)
    found = machine_of(tmp_path)
    assert found == this_machine() and found is not None
    assert found.versions["kitae"] == version("kitae") and found.versions["torch"] == version("torch")
    assert found.cores == len(os.sched_getaffinity(0)) and found.memory_gb > 0.1
    for text in ("", "[]", '{"gpus": 1}', '{"gpus": [], "new": 1}'):
        (tmp_path / FILE).write_text(text)
        assert machine_of(tmp_path) is None, text


def test_hardware_in_a_line() -> None:
    found = replace(this_machine(), processor="Xeon", cores=16, memory_gb=127.6, gpus=("H200", "H200", "T4"))
    assert found.hardware == "2 × H200 · T4 · Xeon, 16 cores · 128 GB"
