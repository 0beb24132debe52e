"""Suites: sets of problems with the way to ask them and to judge the answers, by name or of the user's own.

    gsm8k, svamp, math500        maths; judged twice, see `MATHS`
    mbpp, humaneval              programs, run in the sandbox
    ifeval, ifbench              instructions that can be checked; strict, and loose
    reverse, countdown, …        any generated task; "puzzles" stands for two of them
    gym:NAME                     a data set of reasoning-gym
    own                          the task of the run or recipe itself
    FILE.toml                    the held-out prompts of a recipe, with its verifier
    FILE.jsonl (.json, .parquet) the user's questions, read and judged like those of the run or recipe

The data of the first two kinds comes from a folder of the user's, or from the hub.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kitae.config.recipe import load_config
from kitae.config.root import RLConfig, reinforcement
from kitae.data.config import SOURCES, DataConfig
from kitae.data.prompt_stream import eval_prompts, open_stream
from kitae.data.tasks import TASKS
from kitae.envs.config import EnvConfig
from kitae.errors import ConfigError, DataError
from kitae.plugins import nearest
from kitae.types import Prompt
from kitae.verifiers.config import VerifierConfig
from kitae.verifiers.pool import VerifierPool

OWN = "own"
PUZZLES = ("countdown", "knights-and-knaves")
GENERATED = 200
"""Problems of a generated suite if no number is given."""

_FILES = (".jsonl", ".json", ".parquet")
_PUZZLE_TOKENS = {"countdown": 512, "knights-and-knaves": 512, "instructions": 256}


@dataclass(frozen=True, slots=True)
class Scoring:
    """One way to judge answers: `Scoring("strict", "math", {"strict": True})`."""

    label: str
    verifier: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Suite:
    """`Suite("gsm8k", DataConfig(hub="openai/gsm8k", …), MATHS, max_tokens=512)`.

    scorings: the first gives the score of an answer, the others are reported in addition. held_out: whether the data is
    also trained on, so that only its held-out prompts are asked. keep: a column and its lowest and highest value in
    rows of the test set. env: the kind of episode; a single turn unless the task of a run or recipe says otherwise.
    label: names the random streams of the answers. count: problems to ask; None: all, or `GENERATED`.
    """

    name: str
    data: DataConfig
    scorings: tuple[Scoring, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    held_out: bool = False
    keep: tuple[str, int, int] | None = None
    workers: int = 2
    timeout: float = 10.0
    env: EnvConfig = field(default_factory=EnvConfig)
    label: str = ""
    count: int | None = None

    def prompts(self, seed: int) -> list[Prompt]:
        """The problems, in an order that depends on the seed; a longer list begins with a shorter one."""
        if self.held_out:
            return eval_prompts(self.data, seed, GENERATED if self.count is None else self.count)
        stream = open_stream(self.data, seed)
        assert stream.size is not None, f"suite {self.name!r} is generated, so its prompts are held out"
        found = [prompt for i in range(stream.size) if self._keeps(prompt := stream.at(i))]
        if not found:
            raise DataError(f"suite {self.name!r}: no row of {self.data.path} is in the test set ({self.keep})")
        return found[: self.count]

    def _keeps(self, prompt: Prompt) -> bool:
        if self.keep is None:
            return True
        column, low, high = self.keep
        value = prompt.context.get(column)
        return not isinstance(value, int) or low <= value <= high  # a file without the column is the user's own choice

    @property
    def verifier(self) -> tuple[str, Mapping[str, Any]]:
        """Name and params of the verifier that gives all scorings at once, the further ones as components."""
        first, *others = self.scorings
        if not others:
            return first.verifier, first.params
        parts = [{"name": s.verifier, "label": s.label, "params": dict(s.params)} for s in self.scorings]
        return "compose", {"parts": [parts[0], *({**part, "weight": 0.0} for part in parts[1:])]}

    def pool(self, note: Callable[[str], None] | None = None, workers: int | None = None) -> VerifierPool:
        name, params = self.verifier
        return VerifierPool(name, params, workers or self.workers, self.timeout, note)


MATHS = (Scoring("strict", "math", {"strict": True}), Scoring("last", "math", {"extract": "boxed,hash,last"}))
r"""strict: the answer in a \boxed or after ####, as prompts ask for. last: that, or else the last number or formula.
The two can differ widely for a model that does not keep to the form, so neither is reported alone."""

FOLLOWED = (
    Scoring("strict", "instructions", {"mode": "strict"}),
    Scoring("loose", "instructions", {"mode": "loose"}),
)
PROGRAM = (Scoring("score", "code"),)

_THINK = "{question}\nThink step by step, and put your final answer within \\boxed{}."
_HASHES = "{question}\nThink step by step. End with a line that holds only #### and the number."
_CODE = "{question}\n\nAnswer with one Python code block."


@dataclass(frozen=True, slots=True)
class KnownSuite:
    """A public test set: where it is on the hub, its file names elsewhere, and how it is asked and judged."""

    summary: str
    hub: str
    hub_files: str
    files: tuple[str, ...]
    scorings: tuple[Scoring, ...]
    max_tokens: int
    data: Mapping[str, Any]
    keep: tuple[str, int, int] | None = None
    timeout: float = 10.0


KNOWN: dict[str, KnownSuite] = {
    "gsm8k": KnownSuite(
        "Grade-school word problems (1,319).",
        "openai/gsm8k",
        "main/test-*.parquet",
        ("test.jsonl", "main/test-*.parquet"),
        MATHS,
        512,
        {"answer_after": "####", "instruction": _HASHES},
    ),
    "svamp": KnownSuite(
        "One-step word problems with what is not needed (1,000; 300 on the hub).",
        "ChilleD/SVAMP",
        "data/test-*.parquet",
        ("test.jsonl", "SVAMP.json", "data/test-*.parquet"),
        MATHS,
        512,
        {"format": "svamp", "instruction": _HASHES},
    ),
    "math500": KnownSuite(
        "Competition problems of MATH (500).",
        "HuggingFaceH4/MATH-500",
        "test.jsonl",
        ("test.jsonl",),
        MATHS,
        2048,
        {"format": "math", "instruction": _THINK},
    ),
    "mbpp": KnownSuite(
        "Small Python functions: the test split, tasks 11 to 510.",
        "google-research-datasets/mbpp",
        "full/test-*.parquet",
        ("mbpp.jsonl", "test.jsonl", "full/test-*.parquet"),
        PROGRAM,
        1024,
        {"format": "mbpp", "instruction": _CODE},
        keep=("task_id", 11, 510),
        timeout=60.0,
    ),
    "humaneval": KnownSuite(
        "Python functions to complete (164).",
        "openai/openai_humaneval",
        "openai_humaneval/test-*.parquet",
        ("HumanEval.jsonl", "test.jsonl", "openai_humaneval/test-*.parquet"),
        PROGRAM,
        1024,
        {"format": "humaneval", "instruction": _CODE},
        timeout=60.0,
    ),
    "ifeval": KnownSuite(
        "Instructions whose following can be checked (541).",
        "google/IFEval",
        "ifeval_input_data.jsonl",
        ("input_data.jsonl", "ifeval_input_data.jsonl"),
        FOLLOWED,
        1280,
        {"format": "ifeval"},
    ),
    "ifbench": KnownSuite(
        "The same with other instructions, for models trained on IFEval's (300).",
        "allenai/IFBench_test",
        "data/train-*.parquet",
        ("IFBench_test.jsonl", "test.jsonl", "data/train-*.parquet"),
        FOLLOWED,
        1280,
        {"format": "ifeval"},
    ),
}


def own_suite(config: RLConfig, name: str | None = None) -> Suite:
    """The task of a run or recipe: its held-out prompts, judged as in training."""
    c = config
    return _judged(
        c.verifier, Suite(name or c.run.name, c.data, (), c.sampling.max_tokens, c.sampling.stop, True, env=c.env)
    )


def find_suites(names: Iterable[str], folder: str | None, config: RLConfig | None) -> list[Suite]:
    """The suites of these names. folder: where the data of public ones lies; None: the hub. config: of the run or
    recipe, for "own" and files. Raises `ConfigError` for an unknown or repeated name."""
    expanded = [each for name in names for each in (PUZZLES if name == "puzzles" else (name,))]
    suites = [_find(name, folder, config) for name in expanded]
    found = [suite.name for suite in suites]
    if twice := [name for name in dict.fromkeys(found) if found.count(name) > 1]:
        raise ConfigError(f"each suite is asked once, got {twice[0]!r} twice")
    return suites


def _find(name: str, folder: str | None, config: RLConfig | None) -> Suite:
    if name in KNOWN:
        return _known(name, KNOWN[name], folder)
    if name in TASKS:
        scoring = (Scoring("score", TASKS[name].verifier),)
        tokens = _PUZZLE_TOKENS.get(name, 64)
        return Suite(name, DataConfig(task=name), scoring, tokens, held_out=True, label=f"eval:{name}")
    kind, colon, rest = name.partition(":")
    if colon and kind == "gym":
        data = DataConfig(gym=rest, instruction="{question}\nGive your final answer within <answer></answer>.")
        return Suite(name, data, (Scoring("score", "gym"),), 512, held_out=True, label=f"eval:{name}")
    path = Path(name).expanduser()
    if path.suffix == ".toml":
        return replace(own_suite(reinforcement(load_config(path), "a suite"), path.stem), label=f"eval:{path.stem}")
    if name != OWN and path.suffix not in _FILES:
        known = [OWN, *KNOWN, "puzzles", *TASKS]
        raise ConfigError(
            f"a suite is one of {', '.join(known)}, gym:NAME, a recipe file or a data file, got {name!r}"
            f"{nearest(name, known)}"
        )
    if config is None:
        raise ConfigError(f"suite {name!r} is read and judged as a run's or recipe's own data is, got neither")
    if name == OWN:
        return own_suite(config)
    return _from_file(path, config)


def _known(name: str, known: KnownSuite, folder: str | None) -> Suite:
    if folder is None:
        source = {"hub": known.hub, "hub_files": known.hub_files, "hub_eval_files": None}
    else:
        source = {"path": str(_find_file(name, known.files, Path(folder).expanduser()))}
    data = DataConfig(**source, **known.data)
    suite = Suite(name, data, known.scorings, known.max_tokens, timeout=known.timeout, label=f"eval:{name}")
    return replace(suite, keep=known.keep)


def _find_file(name: str, files: Sequence[str], folder: Path) -> Path:
    """`DIR/gsm8k/test.jsonl`, or `DIR/gsm8k.jsonl`."""
    if not folder.is_dir():
        raise DataError(f"eval.data (--data) must name a folder, got {folder}, which is none")
    wanted = [*(f"{name}/{file}" for file in files), *(f"{name}{end}" for end in _FILES)]
    for pattern in wanted:
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            raise DataError(f"suite {name!r} must be one file, got {len(found)} that match {folder / pattern}")
        if found:
            return found[0]
    raise DataError(
        f"no data for suite {name!r} in {folder}: looked for {', '.join(wanted)}; without a folder, the hub is asked"
    )


def _from_file(path: Path, config: RLConfig) -> Suite:
    """All questions of a file, read with the keys, format and instruction of the config's own data."""
    if not path.is_file():
        raise DataError(f"suite {str(path)!r} must name a file, but nothing is there (in {Path.cwd()})")
    kept = config.data.model_dump(exclude={*SOURCES, "params", "eval_path"}, exclude_unset=True)
    suite = Suite(path.stem, DataConfig(path=str(path), **kept), (), config.sampling.max_tokens, config.sampling.stop)
    return _judged(config.verifier, replace(suite, label=f"eval:{path.stem}"))


def _judged(verifier: VerifierConfig, suite: Suite) -> Suite:
    scoring = Scoring("score", verifier.name, verifier.params)
    label = suite.label or "eval"
    return replace(suite, scorings=(scoring,), workers=verifier.workers, timeout=verifier.timeout, label=label)
