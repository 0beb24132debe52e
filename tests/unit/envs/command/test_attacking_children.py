"""Further programs of a model, written by other hands than those in `test_forged_rewards`, run by the same careless
agent programs. None finds the reference, a key or a way to a reward; none makes its episode an error."""

import tomllib
from pathlib import Path

import pytest
from test_forged_rewards import HARNESS, JUDGED, REFERENCE, SECRET, episode

FILE = Path(__file__).parents[3] / "data" / "attacks" / "agents.toml"
ATTACKS = {
    f"{kind}: {name}": program
    for kind, programs in tomllib.loads(FILE.read_text()).items()
    for name, program in programs.items()
}


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "OPENAI_ADMIN_KEY", "GH_PAT", "KITAE_API_KEY"):
        monkeypatch.setenv(name, SECRET)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("gives", ["verifier", "program"])
def test_a_child_finds_nothing(name: str, gives: str, tmp_path: Path) -> None:
    secret = gives == "program"
    harness = HARNESS + ("\nreward(0.25)\n" if secret else "")
    rollout, printed = episode(tmp_path, ATTACKS[name], harness, reward=gives, reference=secret)
    assert rollout.score is not None and rollout.score.value == (0.25 if secret else JUDGED), (rollout.score, printed)
    for found in (REFERENCE, SECRET, "ATTACHED"):
        assert found not in printed, printed[:3000]
    assert f"wrote {tmp_path}" not in printed and "wrote /usr" not in printed, printed[:3000]
