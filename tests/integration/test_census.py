"""What docs/families.md says of each causal family of transformers is so; none computes something else."""

from pathlib import Path

import pytest
import torch
from benchmark_scripts import load_script

census = load_script("census")
KNOWN = {verdict.family: verdict for verdict in census.read()}
HERE = [family for family in KNOWN if family in census.families()]
SENTINELS = (
    "deepseek_v3", "deepseek_v32", "diffllama", "gemma4_text", "gpt_bigcode", "gpt_neo", "granite_swa", "llama4_text",
    "mimo_v2_flash", "phimoe", "bloom",
)  # fmt: skip


@pytest.mark.sentinel
def test_every_family_has_a_verdict() -> None:
    """A new one is tried with: python benchmarks/census.py --families NAME --write"""
    assert set(census.families()) <= KNOWN.keys()


@pytest.mark.sentinel
def test_the_page_is_that_of_the_verdicts() -> None:
    assert {v.verdict for v in KNOWN.values()} <= {"runs", "refused", "encoder", "half", "not made"}
    named = [line for line in census.PAGE.read_text().splitlines() if line.startswith("`")]
    assert census.page(list(KNOWN.values())).splitlines()[2] in named


@pytest.mark.sentinel(keep=len(SENTINELS))
@pytest.mark.parametrize("family", SENTINELS)
def test_families_that_differ_most(family: str, tmp_path: Path) -> None:
    assert verdict(family, tmp_path) == KNOWN[family].verdict


@pytest.mark.parametrize("family", [name for name in HERE if name not in SENTINELS])
def test_every_family(family: str, tmp_path: Path) -> None:
    assert verdict(family, tmp_path) == KNOWN[family].verdict


@pytest.mark.filterwarnings("ignore")  # of transformers, about sizes as small as these
def verdict(family: str, folder: Path) -> str:
    torch.manual_seed(0)
    found = census.verdict_of(family, folder)
    return f"{found.verdict}: {found.reason}" if found.verdict in ("wrong", "crashed") else str(found.verdict)
