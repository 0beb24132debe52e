"""Reward models as ordinary folders that `AutoModelForSequenceClassification` loads, Kitae's and others'.

A sequence classifier reads its number at the last token that is not padding, from a head without a bias. So no
conversation may end with the padding token: if it were a stop token, as in many chat models, the number would be read
one token too early. An exported folder therefore has another one.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitae.errors import ModelError
from kitae.models.config import ModelConfig
from kitae.models.load import (
    Load,
    find_model,
    load_policy,
    load_tokenizer,
    pick_dtype,
    prepared,
    ready_device,
)
from kitae.models.quiet import quiet_transformers, reading
from kitae.models.written_folder import written_whole

if TYPE_CHECKING:
    from torch import Tensor

    from kitae.models.scalar import ScalarModel

_HEAD = "score"
_PAD = "<|pad|>"


def check_classifier(folder: Path) -> None:
    """Raise if a folder is no reward model, by its config alone."""
    from transformers import AutoConfig

    with reading("a reward model", folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kinds = getattr(config, "architectures", None) or ["none"]
    if not kinds[0].endswith("ForSequenceClassification") or config.num_labels != 1:
        raise ModelError(
            f"a reward model must be a sequence classifier with 1 label, got {kinds[0]} with {config.num_labels} in "
            f"{folder}"
        )
    classifier_class(config, str(folder))


def is_classifier(folder: Path) -> bool:
    """Whether the config of a folder is that of a sequence classifier, with one label or more."""
    from transformers import AutoConfig

    with reading("a model", folder):
        kinds = getattr(AutoConfig.from_pretrained(folder, trust_remote_code=False), "architectures", None) or [""]
    return str(kinds[0]).endswith("ForSequenceClassification")


def check_reward_start(config: ModelConfig) -> None:
    """Raise unless a reward model can be trained from this: a language model, or a reward model that is trained
    further."""
    folder = find_model(config.path)
    assert folder is not None
    if not is_classifier(folder):
        return
    check_classifier(folder)
    if _find(folder, f"{_HEAD}.bias") is not None:
        raise ModelError(f"a reward model to train further must have a head without a bias, got one in {folder}")


def begin_scalar(config: ModelConfig, seed: int, load: Load = load_policy) -> "ScalarModel":
    """The model that training of a reward model begins with. A language model gets a head of zeros; a reward model
    keeps its own, and its scores."""
    from kitae.models.scalar import ScalarModel

    folder = find_model(config.path)
    assert folder is not None
    if is_classifier(folder):
        return load_scalar(config, seed)
    policy = load(config, seed)
    if policy.vision is not None:  # its spans are scored at positions in a row
        raise ModelError(f"a reward model must begin with a model of text, got {config.path}, which sees")
    classifier_class(policy.base.config, config.path)  # raises if the result could not be exported
    return ScalarModel(policy, bias=False)


def classifier_class(config: Any, source: str) -> Any:
    """The class of sequence classifiers for models with this config. Raises if there is none."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"a reward model must be of a kind that transformers has a sequence classifier for, got "
            f"{config.model_type!r} ({source})"
        )
    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]


def export_scalar(model: "ScalarModel", folder: Path) -> None:
    """Write a folder that `AutoModelForSequenceClassification.from_pretrained` loads, with tokenizer and chat template.

    LoRA adapters are merged into the exported weights; the model itself is not changed. The head is written in fp32,
    whatever the rest is, and must have no bias. Raises `ModelError` if the library has no such class. If the model is
    sharded, all ranks must call this, and the first one writes.
    """
    import copy

    import torch

    from kitae.models.lora import merged_state
    from kitae.models.whole import gathered, is_writer

    policy = model.policy
    if "bias" in dict(model.head.named_parameters()):
        raise ModelError("the head of an exported reward model must have no bias, as sequence classifiers have none")
    config = copy.deepcopy(policy.base.config)
    config.num_labels, config._attn_implementation, config.dtype = 1, None, policy.dtype
    kind = classifier_class(config, policy.source)
    state = {name: tensor for name, tensor in merged_state(policy).items() if not _is_lm_head(name, policy.base)}
    state[f"{_HEAD}.weight"] = gathered(model.head.weight.detach())
    if not is_writer():
        return
    tokenizer = copy.deepcopy(policy.tokenizer)
    _set_padding(tokenizer, policy.base.generation_config, config, state, policy.base)
    with quiet_transformers(), torch.device("meta"):
        shell = kind(config)
    if missing := sorted(shell.state_dict().keys() ^ state.keys()):
        raise ModelError(
            f"{policy.source}: {kind.__name__} must have the weights of the model, but differs in {missing[0]}"
        )
    with written_whole(folder) as scratch, quiet_transformers():
        shell.save_pretrained(scratch, state_dict=state)
        tokenizer.save_pretrained(scratch)
        policy.base.generation_config.save_pretrained(scratch)  # it has further tokens that end a turn


def load_scalar(config: ModelConfig, seed: int = 0) -> "ScalarModel":
    """The reward model in a folder, a run, or on the hub: one that `export_scalar` wrote, or any other sequence
    classifier with one label that reads it at the last token. seed: of adapters, if there are any."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from kitae.models import attention_seam
    from kitae.models.policy import Policy
    from kitae.models.scalar import ScalarModel

    folder = find_model(config.path)
    assert folder is not None
    check_classifier(folder)
    device = ready_device(config)
    with reading("a reward model", folder):
        whole, found = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=pick_dtype(config.dtype, device),
            attn_implementation=attention_seam.NAME,
            output_loading_info=True,
            trust_remote_code=False,
        )
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(whole.config)
    head = getattr(whole, _HEAD, None)
    if not isinstance(head, torch.nn.Linear) or whole.base_model_prefix != base.base_model_prefix:
        raise ModelError(f"a reward model must read a head {_HEAD!r} at the last token, got {type(whole).__name__}")
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"{folder} must hold all weights of {type(whole).__name__}, but lacks {missing[0]}")
    setattr(base, base.base_model_prefix, whole.base_model)
    base.get_output_embeddings().weight = whole.get_input_embeddings().weight  # never used, so it may be anything
    base = prepared(base, config, device)
    if config.lora_rank:
        from kitae.models.lora import add_lora

        torch.manual_seed(seed)
        base = add_lora(base, config)
    policy = Policy(base, load_tokenizer(config)[0], config.path, plain=config.plain)
    policy.check_layers()
    model = ScalarModel(policy, bias=head.bias is not None)
    with torch.no_grad():
        for name, parameter in model.head.named_parameters():
            parameter.copy_(_stored(folder, f"{_HEAD}.{name}", head.get_parameter(name)))
    return model


def _stored(folder: Path, name: str, loaded: "Tensor") -> "Tensor":
    """A tensor in the dtype in which it was written, or if it cannot be read, as it was loaded."""
    found = _find(folder, name)
    return loaded if found is None else found


def _find(folder: Path, name: str) -> "Tensor | None":
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            if name in set(opened.keys()):
                tensor: Tensor = opened.get_tensor(name)
                return tensor
    return None


def _is_lm_head(name: str, base: Any) -> bool:
    head = base.get_output_embeddings()
    return any(module is head and name.startswith(f"{path}.") for path, module in base.named_modules())


def _set_padding(tokenizer: Any, generation: Any, config: Any, state: dict[str, Any], base: Any) -> None:
    """Choose a padding token that no conversation ends with: the tokenizer's own, else that for unknown words, else a
    new one, for which the embeddings are enlarged if need be."""
    from kitae.data.chat import Chat

    stops = {*Chat(tokenizer, generation).stop_tokens, tokenizer.bos_token_id}
    known = [tokenizer.pad_token_id, tokenizer.unk_token_id]
    token = next((t for t in known if t is not None and t not in stops), None)
    if token is None:
        tokenizer.add_special_tokens({"pad_token": _PAD})
        token = tokenizer.pad_token_id
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(token)
    text = config.get_text_config()
    text.pad_token_id = config.pad_token_id = token
    if token >= text.vocab_size:
        _grow(state, base, token + 1)
        text.vocab_size = token + 1


def _grow(state: dict[str, Any], base: Any, rows: int) -> None:
    table = base.get_input_embeddings()
    (name,) = [f"{path}.weight" for path, module in base.named_modules() if module is table]
    old = state[name]
    state[name] = old.new_zeros(rows, old.shape[1])
    state[name][: len(old)] = old
