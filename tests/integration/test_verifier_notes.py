"""What a score function prints during a run reaches whoever watches the run."""

from pathlib import Path

from harness import toy_config

from kitae.observe.observer import Bystander, Silent
from kitae.run.train_run import train

LOUD = """
def score(response, reference, context):
    print("looked at", len(response) > -1)
    return {"score": float(len(response) % 2), "length": len(response)}
"""


class Listener(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_printed_lines_are_notes_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    settings = ["training.steps=1", "eval.prompts=0", "verifier.check_gold=false"]
    config = toy_config(tmp_path, *settings, f"verifier.name={tmp_path / 'loud.py'}:score")
    listener = Listener()
    train(config, Bystander(listener))
    assert listener.notes.count("loud.py:score: looked at True") == 20
    assert listener.notes[-1].endswith("more lines were printed")
