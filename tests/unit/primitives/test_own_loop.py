"""The example of a loop of one's own learns."""

import importlib.util
from pathlib import Path

import kitae

EXAMPLE = Path(kitae.__file__).parent.parent / "examples" / "own_loop.py"


def test_the_reward_of_the_example_rises(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rewards = module.main("tiny", 12, str(tmp_path / "adapter"))
    assert sum(rewards[-4:]) > 1.1 * sum(rewards[:4])
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
