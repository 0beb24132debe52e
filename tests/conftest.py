"""Shared fixtures: tiny random models, made once per test session.

Torch and Kitae are imported where a test needs them: the process that spreads the tests over others needs neither.
"""

import asyncio
import copy
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import warm_starts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kitae.models.config import ModelConfig
    from kitae.models.policy import Policy

pytest_plugins = ["selection"]
# Some kernels can be interpreted where there is no GPU.
collect_ignore = [] if shutil.which("nvidia-smi") or "TRITON_INTERPRET" in os.environ else ["gpu"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Where the processor has no bfloat16, tests of it are left out."""
    from kitae.errors import ModelError

    try:
        return (yield)
    except (ModelError, UserWarning) as error:
        from kitae.models.load import has_bfloat16

        if not has_bfloat16() and ("bfloat16" in str(error) or "bf16 support" in str(error)):
            pytest.skip("this processor cannot compute in bfloat16")
        raise


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_folder("qwen3")`: the folder of a random model of that architecture."""
    from kitae.models.tiny import make_tiny

    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_tiny(tmp_path_factory.mktemp("tiny") / architecture, architecture)
        return made[architecture]

    return get


@pytest.fixture(scope="session")
def copy_policy() -> Callable[["ModelConfig"], "Policy"]:
    """`copy_policy(config)`: the policy as it is loaded, of which the test may change everything but the tokenizer.

    It is loaded once for the session: a copy of a tiny model takes 5 ms, loading it 60 to 180.
    """
    from kitae.models.load import load_policy

    loaded: dict[ModelConfig, Policy] = {}

    def get(config: "ModelConfig") -> "Policy":
        if config not in loaded:
            loaded[config] = load_policy(config)
        policy = loaded[config]
        return copy.deepcopy(policy, {id(policy.tokenizer): policy.tokenizer})

    return get


@pytest.fixture
def tiny_policy(
    tiny_folder: Callable[[str], Path], copy_policy: Callable[["ModelConfig"], "Policy"]
) -> Callable[..., "Policy"]:
    """`tiny_policy("llama", lora_rank=4)`: a policy of its own, as it was loaded; in fp32 unless told otherwise."""
    from kitae.models.config import ModelConfig

    def get(architecture: str = "llama", **settings: object) -> "Policy":
        values = {"dtype": "float32", "device": "cpu", "path": str(tiny_folder(architecture)), **settings}
        return copy_policy(ModelConfig.model_validate(values))

    return get


@pytest.fixture(scope="session")
def demo_tokenizer() -> "PreTrainedTokenizerBase":
    """That of the demo model, which is made ready if it is installed."""
    from transformers import AutoTokenizer

    from kitae.errors import ModelError
    from kitae.models.load import SMOLLM2, find_model

    try:
        return AutoTokenizer.from_pretrained(find_model(SMOLLM2))
    except ModelError:
        pytest.skip("the demo model is not installed")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny tensors are slower on several threads, and far slower on a busy machine."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when a test imports it
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def warm_server() -> Iterator[warm_starts.Server]:
    server = warm_starts.Server.started()
    yield server
    server.close()


def _start_warm(server: warm_starts.Server, boots: tuple[str, ...]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "create_subprocess_exec", server.instead_of(asyncio.create_subprocess_exec, boots))
        yield


@pytest.fixture(scope="module")
def warm_posts(warm_server: warm_starts.Server) -> Iterator[None]:
    """Ranks, engines, hosts and teachers on this machine start with their imports done."""
    yield from _start_warm(warm_server, warm_starts.POSTS)


@pytest.fixture(scope="module")
def warm_verifiers(warm_server: warm_starts.Server) -> Iterator[None]:
    """So do the processes of verifiers."""
    yield from _start_warm(warm_server, warm_starts.VERIFIERS)
