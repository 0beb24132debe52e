"""The notebooks of the examples run as they stand: functions of their cells as rewards, stopped, resumed, plotted."""

from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"


def executed(name: str, folder: Path) -> Any:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute()
    return notebook


def outputs(notebook: Any) -> list[tuple[str, list[str]]]:
    """Of each cell of code: what was printed, and the kinds of what was displayed."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            said = "".join(each.text for each in cell.outputs if each.output_type == "stream")
            shown = [kind for each in cell.outputs if "data" in each for kind in each.data]
            found.append((said, shown))
    return found


@pytest.mark.sentinel
@pytest.mark.filterwarnings("default")
def test_closures_are_trained_on_interrupted_resumed_and_plotted(tmp_path: Path) -> None:
    notebook = executed("rewards_in_a_notebook.ipynb", tmp_path)
    _, _, trained, stepped, stopped, resumed, plotted, asked = outputs(notebook)
    for said, shown in (trained, stepped, stopped, resumed):
        assert "run folder runs/" in said and "image/png" in shown, "live curves, in the cell that runs"
    assert "\n5 " in stepped[0] and "\n10 " in stepped[0]
    assert "everything is saved" in stopped[0] and 'kitae.resume("runs/long-001", reward=[…])' in stopped[0]
    assert "reward 'length' is not what the run began with" in resumed[0]
    assert "image/png" in plotted[1] and asked[0].startswith("[")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["long-001", "run-001", "run-002"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")
def test_examples_then_rewards(tmp_path: Path) -> None:
    notebook = executed("examples_then_rewards.ipynb", tmp_path)
    said = "".join(text for text, _ in outputs(notebook))
    assert "Say " in said and "error" not in said.lower()
