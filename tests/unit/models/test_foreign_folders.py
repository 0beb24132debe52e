"""Models as other trainers leave them: adapters of peft, a Trainer's folder, verl's shards; and merges of models."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from kitae.cli.export import export
from kitae.config.recipe import model_settings
from kitae.errors import ConfigError, ModelError
from kitae.models.config import WHOLE, ModelConfig
from kitae.models.foreign_folder import joined, write_joined
from kitae.models.load import find_model, load_policy
from kitae.models.merge_models import mean_of, ties_of, write_merged
from kitae.models.written_folder import export_policy
from kitae.run.doubts import doubts_of_start

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


@pytest.fixture
def adapter(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """As peft itself writes it: rslora, another rank for one kind of layer, dropout, factors that are not zero."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    lora = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_rslora=True, lora_dropout=0.1,
        rank_pattern={"down_proj": 2}, task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = peft.get_peft_model(model, lora)
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def of_peft(adapter: Path, tokens: torch.Tensor) -> torch.Tensor:
    """What peft's own model gives."""
    said = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(said, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = peft.PeftModel.from_pretrained(base, adapter)(tokens[None]).logits[0]
    return found


def test_training_goes_on_from_adapters_of_peft(adapter: Path, tmp_path: Path) -> None:
    config = model_settings(str(adapter)).model
    assert (config.lora_rank, config.lora_alpha, config.lora_targets) == (4, 6.0, "down_proj,q_proj")
    assert config.path != str(adapter) and config.adapter == str(adapter)
    assert ModelConfig(**config.model_dump()) == config, "a run that is resumed reads it again"
    assert ModelConfig(path=config.path, adapter=str(adapter)) == config
    policy = load_policy(ModelConfig(path=str(adapter), dtype="float32", device="cpu"))
    tokens = torch.arange(3, 20)
    wanted = of_peft(adapter, tokens).log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(policy.score(tokens), wanted, atol=1e-5, rtol=1e-5)
    assert [p.dtype for p in policy.model.parameters() if p.requires_grad] == [torch.float32] * 8
    assert any("dropout" in text for text in doubts_of_start(config, Path(config.path)))
    export_policy(policy, tmp_path / "model")
    again = tmp_path / "model/adapter"
    assert json.loads((again / "adapter_config.json").read_text())["use_rslora"] is True
    torch.testing.assert_close(of_peft(again, tokens), of_peft(adapter, tokens))
    export(str(adapter), tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens[None]).logits[0], of_peft(adapter, tokens), atol=0.02, rtol=0.02)
    assert "adapters merged" in (tmp_path / "merged/README.md").read_text()


def test_other_models_have_no_adapters(adapter: Path, tiny_folder: Callable[[str], Path]) -> None:
    config = ModelConfig(path=str(adapter))
    assert config.at(str(tiny_folder("llama"))).lora_rank == 0
    assert config.at(str(adapter)) == config
    assert not ModelConfig(**{**config.model_dump(), **WHOLE}).adapter
    with pytest.raises(ModelError, match="has adapters, and no model: merge them with: kitae export"):
        find_model(str(adapter))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("use_dora", True, "use_dora = True is not supported: weights in magnitude"),
        ("modules_to_save", ["lm_head"], "whole modules"),
        ("bias", "all", "trained biases"),
        ("init_lora_weights", "pissa", "it changes the base"),
        ("peft_type", "IA3", "must be LORA, got 'IA3'"),
        ("r", None, "must have r"),
        ("base_model_name_or_path", None, "which they do not say"),
    ],
)
def test_what_kitae_lacks_is_refused_by_name(adapter: Path, setting: str, value: Any, message: str) -> None:
    said = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**said, setting: value}))
    with pytest.raises(ConfigError, match=message):
        model_settings(str(adapter))


def test_settings_that_say_otherwise_are_refused(adapter: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_rank must be left out, or 4 as .* has it, got 8"):
        model_settings(str(adapter), ["model.lora_rank=8"])
    with pytest.raises(ConfigError, match=r"adapter must be a folder with adapter_config.json"):
        model_settings("tiny", ["model.adapter=/nowhere"])
    factors = load_file(adapter / "adapter_model.safetensors")
    save_file(dict(list(factors.items())[1:]), adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="factors of the layers that it adapts, got 7 for 8"):
        load_policy(ModelConfig(path=str(adapter), dtype="float32", device="cpu"))


def test_a_trainers_output_folder_is_its_last_checkpoint(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    for step in (9, 10):
        shutil.copytree(tiny_folder("llama"), tmp_path / f"out/checkpoint-{step}")
    (tmp_path / "out/checkpoint-10/optimizer.pt").touch()
    last = find_model(str(tmp_path / "out"))
    assert last == tmp_path / "out/checkpoint-10"
    said = list(doubts_of_start(ModelConfig(path=str(tmp_path / "out")), last))
    assert "its last checkpoint checkpoint-10 is taken" in said[0] and "its moments start anew" in said[1]


_RANKS = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
source, out, rank, names, *shape = sys.argv[1:]
rank, shape = int(rank), tuple(map(int, shape))
world = torch.tensor(shape).prod().item()
dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names.split(",")))
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
torch.save(model.state_dict(), f"{out}/model_world_size_{world}_rank_{rank}.pt")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [("fsdp", 3), ("ddp,fsdp", 2, 2)])
def test_shards_of_verl_are_put_together(
    shape: tuple[Any, ...], tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that shard and save as verl's do; 3 does not divide the sizes."""
    monkeypatch.setenv("KITAE_CACHE", str(tmp_path / "cache"))
    source, actor = tiny_folder("qwen2"), tmp_path / "global_step_7/actor"
    actor.mkdir(parents=True)
    shutil.copytree(source, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    names, *sizes = map(str, shape)
    count = int(torch.tensor(shape[1:]).prod())
    started = [
        subprocess.Popen([sys.executable, "-c", _RANKS, str(source), str(actor), str(rank), names, *sizes])
        for rank in range(count)
    ]
    assert [process.wait(300) for process in started] == [0] * count
    wanted = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    found = joined(actor)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    folder = find_model(str(actor.parent))
    assert folder is not None and folder == find_model(str(actor)), "it is put together once"
    written = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    policy = load_policy(ModelConfig(path=str(actor), dtype="float32", device="cpu"))
    assert policy.tokenizer.eos_token_id is not None


def write_shards(tensors: dict[str, torch.Tensor], folder: Path, ranks: int) -> None:
    """As `ranks` processes write them, by one that is each of them in turn."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
            state = {}
            for name, whole in tensors.items():
                parts = whole.chunk(ranks)
                part = parts[rank] if rank < len(parts) else whole[:0]
                size = {"shape": whole.shape, "stride": whole.stride()}
                state[name] = DTensor.from_local(part.clone(), mesh, [Shard(0)], run_check=False, **size)
            torch.save(state, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


def test_shards_make_a_model(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KITAE_CACHE", str(tmp_path / "cache"))
    source, actor = tiny_folder("qwen2"), tmp_path / "global_step_7/actor"
    wanted = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    write_shards(wanted, actor, 3)
    shutil.copytree(source, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    folder = find_model(str(actor.parent))
    assert folder is not None and folder == find_model(str(actor)), "it is put together once"
    written = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    assert "put together" in next(iter(doubts_of_start(ModelConfig(path=str(actor)), folder)))
    shard = actor / "model_world_size_3_rank_1.pt"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"rank_1\.pt cannot be read as tensors"):
        joined(actor)
    shard.unlink()
    with pytest.raises(ModelError, match="must hold the shards of all ranks"):
        joined(actor)


def test_shards_with_adapters_are_refused(tmp_path: Path) -> None:
    write_shards({"base_model.model.q.lora_A.default.weight": torch.ones(2, 2)}, tmp_path / "actor", 2)
    (tmp_path / "actor/huggingface").mkdir()
    (tmp_path / "actor/huggingface/config.json").write_text("{}")
    with pytest.raises(ModelError, match="has adapters in its shards"):
        write_joined(tmp_path / "actor", tmp_path / "out")


def test_shards_that_are_programs_are_not_run(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "harm",)

    torch.save({"weight": Harm()}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(ModelError, match="cannot be read as tensors"):
        joined(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_means_and_ties_by_hand() -> None:
    base = torch.tensor([1.0, 1.0, 1.0, 1.0])
    one, two = torch.tensor([2.0, 0.5, 1.1, 4.0]), torch.tensor([3.0, 2.0, 1.0, -1.0])
    torch.testing.assert_close(mean_of([one, two], [1.0, 3.0]), torch.tensor([2.75, 1.625, 1.025, 0.25]))
    # changes (1, −.5, .1, 3) and (2, 1, 0, −2): the two largest kept are (1, 0, 0, 3) and (2, 0, 0, −2); signs + 0 0 +
    torch.testing.assert_close(ties_of(base, [one, two], [1.0, 1.0], 0.5), torch.tensor([2.5, 1.0, 1.0, 4.0]))
    # all kept: signs + + + +, so the second weight is that of `two` alone, the third and fourth those of `one`
    torch.testing.assert_close(ties_of(base, [one, two], [1.0, 1.0], 1.0), torch.tensor([2.5, 2.0, 1.1, 4.0]))
    # weights 1 and 3: changes add up to (7, 2.5, .1, −3)
    torch.testing.assert_close(ties_of(base, [one, two], [1.0, 3.0], 1.0), torch.tensor([2.75, 2.0, 1.1, -1.0]))


def test_ties_are_those_of_peft() -> None:
    from peft.utils.merge_utils import ties

    torch.manual_seed(0)
    base, *models = torch.randn(4, 30, 20)
    wanted = base + ties([m - base for m in models], torch.ones(3), density=0.3)
    torch.testing.assert_close(ties_of(base, models, [1.0] * 3, 0.3), wanted)


def test_merges_are_exported(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny_folder("llama")
    for name, change in (("a", 0.25), ("b", 0.75)):
        shutil.copytree(base, tmp_path / name)
        state = load_file(base / "model.safetensors")
        save_file({n: t + change for n, t in state.items()}, tmp_path / name / "model.safetensors", {"format": "pt"})
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    export(a, tmp_path / "mean", merge=[b], weights="1,3")
    export(a, tmp_path / "ties", merge=[b], density=1.0, base=str(base))
    states = [load_file(folder / "model.safetensors") for folder in (base, tmp_path / "mean", tmp_path / "ties")]
    for name, tensor in states[0].items():
        for state, change in zip(states[1:], (0.625, 0.5), strict=True):
            torch.testing.assert_close(state[name].float(), tensor.float() + change, atol=0.01, rtol=0.01)
    assert "TIES on" in (tmp_path / "ties/README.md").read_text()
    load_policy(ModelConfig(path=str(tmp_path / "mean"), dtype="float32", device="cpu"))
    with pytest.raises(ModelError, match="TIES needs --base MODEL"):
        export(a, tmp_path / "no", merge=[b], density=0.5)
    with pytest.raises(ModelError, match="2 positive numbers"):
        export(a, tmp_path / "no", merge=[b], weights="1")
    with pytest.raises(ModelError, match="the same tensors"):
        write_merged([ModelConfig(path=a), ModelConfig(path=str(tiny_folder("qwen2")))], tmp_path / "no")
