"""Every key that a peer knows: `peer_keys.py trl` or `peer_keys.py verl`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any


def of_trl() -> dict[str, list[str]]:
    import trl

    kinds = {"grpo": "GRPO", "rloo": "RLOO", "sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}
    common = [field.name for kind in (trl.ModelConfig, trl.ScriptArguments) for field in dataclasses.fields(kind)]
    return {
        name: [*common, *(field.name for field in dataclasses.fields(getattr(trl, f"{kind}Config")))]
        for name, kind in kinds.items()
    }


def of_verl() -> dict[str, list[str]]:
    import verl
    from omegaconf import OmegaConf

    file = Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml"

    def keys(values: Any, path: str = "") -> list[str]:
        found = []
        for key, value in values.items():
            found += keys(value, f"{path}{key}.") if isinstance(value, dict) and value else [f"{path}{key}"]
        return found

    return {"ppo": keys(OmegaConf.to_container(OmegaConf.load(file), resolve=False))}


print(json.dumps({"trl": of_trl, "verl": of_verl}[sys.argv[1]]()))
