"""Settings: what is refused and in which words, what overrides mean, and that no flag is idle."""

import ast
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError, create_model
from short_settings import spelled

import kitae
from kitae.algorithms.presets import PRESETS
from kitae.algorithms.stages import STAGES, keyword_settings
from kitae.config.hints import DECIDED, ELSEWHERE, RENAMED, hint
from kitae.config.recipe import _settings, load_config, override_config, parse_config
from kitae.config.root import ROOTS, RLConfig
from kitae.data.tasks import TASKS
from kitae.errors import ConfigError
from kitae.section import Section

MINIMAL = {"data": {"task": "reverse"}}
PACKAGE = Path(kitae.__file__).parent
SECTIONS: dict[str, type[Section]] = {name: info.annotation for name, info in RLConfig.model_fields.items()}  # type: ignore[misc]


def refused(values: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    return str(caught.value)


def with_(**sections: dict[str, Any]) -> dict[str, Any]:
    """Sections beside the smallest ones; settings of an algorithm are spelled in short."""
    found = {**MINIMAL, **sections}
    return {**found, "algorithm": spelled(found["algorithm"])} if "algorithm" in found else found


HERE = {"kind": "vllm", "urls": ["http://127.0.0.1:8001"]}


# Unknown names.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (with_(trainig={}), "unknown section 'trainig'; did you mean 'training'?"),
        (with_(training={"learning_rate": 1}), "unknown key training.learning_rate; Kitae calls it training.lr"),
        (with_(training={"max_new_tokens": 1}), "Kitae calls it sampling.max_tokens"),
        (with_(training={"step": 1}), "unknown key training.step; did you mean training.steps?"),
        (with_(sampling={"temprature": 1}), "unknown key sampling.temprature; did you mean sampling.temperature?"),
        (
            with_(training={"max_tokens": 1}),
            "unknown key training.max_tokens; did you mean sampling.max_tokens or eval.max_tokens?",
        ),
        (with_(xyzzy={}), "unknown section 'xyzzy'; valid are run, method, model"),
        (with_(run={"qqqqqqqqqqqqqqqqqqqq": 1}), "unknown key run.qqqqqqqqqqqqqqqqqqqq; valid are run.name, run.dir"),
        (with_(training=5), "'training' is a section, got the value 5"),
        (with_(training={"lerning_rate": 1}), "unknown key training.lerning_rate; Kitae calls it training.lr"),
        (with_(training={"save_steps": 1}), "unknown key training.save_steps; Kitae calls it checkpoint.every"),
        (with_(training={"every": 1}), "unknown key training.every; did you mean checkpoint.every or eval.every?"),
        (with_(steps=5), "unknown section 'steps'; did you mean training.steps?"),
        (with_(num_generations=5), "unknown section 'num_generations'; Kitae calls it training.group_size"),
        (with_(actor_rollout_ref={"rollout": {"n": 8}}), "actor_rollout_ref.rollout.n; Kitae calls it training.group"),
    ],
)
def test_unknown_names_point_to_the_nearest(values: dict[str, Any], message: str) -> None:
    assert message in refused(values)


@pytest.mark.parametrize(
    ("section", "key"),
    [("engine", "backend"), ("training", "logging_steps"), ("engine", "use_vllm"), ("run", "report_to")],
)
def test_what_does_not_exist_is_said_to_be_absent_and_nothing_is_suggested(section: str, key: str) -> None:
    message = refused(with_(**{section: {key: 1}}))
    assert message.startswith(f"unknown key {section}.{key}; not supported: ")
    assert "did you mean" not in message


def test_a_key_like_none_lists_the_section_and_no_other() -> None:
    message = refused(with_(eval={"xyzzy": 1}))
    keys = [f"eval.{k}" for k in SECTIONS["eval"].model_fields]
    more = f" and {len(keys) - 8} more, see docs/configuration.md" if len(keys) > 8 else ""
    assert message == f"unknown key eval.xyzzy; valid are {', '.join(keys[:8])}{more}"


def test_all_problems_are_named_at_once() -> None:
    message = refused(with_(training={"stepz": 1}, eval={"prompt": 2}, modle={}))
    assert [line.split(";")[0] for line in message.splitlines()] == [
        "unknown key training.stepz",
        "unknown key eval.prompt",
        "unknown section 'modle'",
    ]
    message = refused(with_(training={"steps": 0, "lr": -1}))
    assert len(message.splitlines()) == 2


# Values and contradictions.

NUMBERS = [
    (section, key)
    for section, cls in SECTIONS.items()
    for key, field in cls.model_fields.items()
    if re.search(r"\bint\b|\bfloat\b|\[0, 1\]", str(field.annotation)) and "bool" not in str(field.annotation)
]


def test_there_are_numbers_in_every_section_but_two() -> None:
    assert {section for section, _ in NUMBERS} == set(SECTIONS) - {"method", "data"}


@pytest.mark.parametrize(("section", "key"), NUMBERS)
@pytest.mark.parametrize("value", [True, False])
def test_true_is_no_number(section: str, key: str, value: bool) -> None:
    field = SECTIONS[section].model_fields[key]
    with pytest.raises(ValidationError, match="must be a number"):
        create_model("Only", __base__=Section, **{key: (field.annotation, field)})(**{key: value})  # type: ignore[call-overload]


def test_true_is_no_number_in_so_many_words() -> None:
    assert refused(with_(training={"lr": True})) == "training.lr: must be a number, got true"
    assert refused(with_(run={"seed": False})) == "run.seed: must be a number, got false"
    assert refused(with_(algorithm={"kl_coef": True})) == "algorithm.kl.coef: must be a number, got true"
    assert parse_config(with_(model={"plain": True})).model.plain is True


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": {}}, "data needs exactly one of task, gym, path, hub, got none"),
        ({"data": {"task": "sort", "path": "x.jsonl"}}, "exactly one of task, gym, path, hub, got task and path"),
        ({"data": {"path": "x", "hub": "y", "task": "z"}}, "got task and path and hub"),
        ({"data": {"task": "sort", "instruction": "Sort!"}}, "data.instruction must contain {question}, got 'Sort!'"),
        ({"data": {"path": "x.jsonl", "params": {"count": 3}}}, "data.params belongs to a generated task"),
        (with_(algorithm={"preset": "gropo"}), f"one of {', '.join(PRESETS)}, got 'gropo'; did you mean 'grpo'?"),
        (with_(algorithm={"preset": "xyzzy"}), f"algorithm.preset must be one of {', '.join(PRESETS)}, got 'xyzzy'"),
        (with_(algorithm={"dual_clip": 1.1}), "algorithm.gate.dual_clip must exceed 1 + clip_high = 1.2, got 1.1"),
        (with_(algorithm={"dual_clip": 1.2}), "algorithm.gate.dual_clip must exceed 1 + clip_high = 1.2, got 1.2"),
        (
            with_(algorithm={"preset": "dapo", "dual_clip": 1.25}),
            "algorithm.gate.dual_clip must exceed 1 + clip_high = 1.28, got 1.25",
        ),
        (with_(training={"group_size": 1}), "group_size must be at least 2 for advantage 'group-zscore', got 1"),
        (
            with_(training={"minibatches": 9}),
            "training.minibatches must be at most prompts_per_step = 8, got 9",
        ),
        (
            with_(algorithm={"overlong_buffer": 65}),
            "algorithm.shaping.overlong_buffer must be at most sampling.max_tokens = 64, got 65",
        ),
        (with_(algorithm={"routing": "old"}), "needs training.minibatches × training.epochs above 1, got 1"),
        (
            with_(algorithm={"experts_balance_coef": 0.01}),
            "algorithm.experts.balance_coef = 0.01 needs algorithm.experts.routing = 'old' or 'engine', which know the "
            "experts of a batch before its first update, got 'own'",
        ),
        (
            with_(algorithm={"experts_z_coef": 0.1}, cluster={"backend": "local", "ranks": 2}),
            "algorithm.experts.z_coef must be 0 with ranks (cluster.ranks above 1, or backend 'ray'), got 0.1",
        ),
        (
            with_(algorithm={"routing": "old"}, training={"epochs": 2}, cluster={"backend": "local", "ranks": 2}),
            "algorithm.experts.routing = 'old' needs cluster.ranks = 1, got 2",
        ),
        (
            with_(algorithm={"routing": "engine"}, cluster={"backend": "local", "ranks": 2}),
            "algorithm.experts.routing = 'engine' needs cluster.ranks = 1, got 2",
        ),
        (
            with_(model={"device": "cuda:1"}, cluster={"backend": "ray"}),
            "model.device must be auto, cpu or cuda with cluster.backend = 'ray', got 'cuda:1'",
        ),
        (
            with_(model={"device": "cuda"}, cluster={"backend": "ray", "pools": {"engines": {"gpus": 0}}}),
            "cluster.pools.engines.gpus must be above 0 with model.device = 'cuda', got 0",
        ),
        (
            with_(algorithm={"routing": "engine"}, cluster={"backend": "ray"}),
            "algorithm.experts.routing = 'engine' needs the trainer beside the controller, got cluster.backend = 'ray'",
        ),
        (
            with_(algorithm={"routing": "engine"}, engine=HERE),
            "algorithm.experts.routing = 'engine' needs Kitae's own engines, which record the experts that they "
            "choose, got engine.kind = 'vllm'",
        ),
        (with_(pipeline={"refill": 3}), "pipeline.refill replaces dropped groups, but algorithm.filter = 'none'"),
        (
            with_(engine={"kind": "native", "count": 2}),
            "engine.count must be 1 with engine.kind = 'native', got 2",
        ),
        (
            with_(engine={"kind": "native"}, cluster={"backend": "local", "ranks": 2}),
            "engine.kind must be one with weights of its own (process, vllm, sglang) with cluster.ranks above 1 or "
            "cluster.backend = 'ray', got 'native' with 2 and 'local'",
        ),
        (with_(cluster={"engines": 2}), "unknown key cluster.engines; Kitae calls it engine.count"),
        (with_(engine={"merge_adapters": True}), "it is no setting any more: adapters are merged"),
        (with_(engine={"urls": ["http://a:1"]}), "engine.urls needs engine.kind = 'vllm' or 'sglang', got ('http://a:1"),
        (with_(engine={"spot_check": 0.1}), "engine.spot_check must be 0 with engine.kind = 'native', got 0.1"),
        (with_(engine={"proof": {"share": 1}}), "engine.proof.share needs engine.kind = 'process', got 1 with"),
        (with_(engine=HERE | {"proof": {"share": 0.1}}), "servers of other people send no proofs"),
        (with_(engine={"proof": {"share": 1.5}}), "less than or equal to 1"),
        (with_(engine={"kind": "vllm"}), "needs either engine.server, to start servers, or engine.urls"),
        (with_(engine=HERE | {"server": "python"}), "to use some that run, got both"),
        (with_(engine=HERE | {"max_batch": 7}), "engine.max_batch is for servers that Kitae starts, got 7"),
        (with_(engine=HERE | {"urls": ["ftp://x"]}), "engine.urls must be http://HOST:PORT, got 'ftp://x'"),
        (with_(engine=HERE | {"urls": ["http://far:1"]}), "engine.weights_folder must be a folder that it sees"),
        (with_(engine=HERE | {"urls": ["http://localhost:1"] * 2}), "engine.urls must name each server once"),
        (with_(engine=HERE | {"host_memory_gb": 2}), "engine.host_memory_gb is not set for a server"),
        (with_(engine=HERE | {"cache_dtype": "int8"}), "engine.cache_dtype is not set for a server"),
        (with_(engine=HERE | {"speculation": False}), "engine.speculation = false is for Kitae's own engines"),
        (with_(engine=HERE | {"weights_dtype": "float8"}), "engine.weights_dtype is not set for a server"),
        (with_(engine={"weights_dtype": "int8"}), "engine.weights_dtype: input should be 'model' or 'float8'"),
        (
            with_(engine={"weights_dtype": "float8"}, model={"plain": True}),
            "model.plain needs engine.weights_dtype = 'model', got 'float8'",
        ),
        (
            with_(engine={"weights_dtype": "float8"}, model={"exact": True}),
            "model.exact needs engine.weights_dtype = 'model', got 'float8': 8 bits are not exact",
        ),
        (with_(engine=HERE, model={"exact": True}), "model.exact needs Kitae's own kernels in the engine"),
        (with_(engine=HERE, eval={"top_p": 0.5, "min_p": 0.1}), "eval.top_p or eval.min_p must be off"),
        (with_(engine=HERE | {"kind": "sglang"}), "pipeline.in_flight must be 'recompute' with engine.kind = 'sglang'"),
        (with_(engine=HERE | {"kind": "sglang"}, eval={"top_k": 4}), "eval.top_p, top_k and min_p must be off"),
        (with_(env={"command": "a", "name": "tools"}), "env.command is run by env.name = 'command', got 'tools'"),
        (with_(env={"command": "a", "params": {"command": "b"}}), "env.params must have no command, got 'b'"),
        (with_(eval={"samples": 4}), "eval.samples must be 1 when eval.temperature is 0 (greedy), got 4"),
        (with_(training={"steps": 0}), "training.steps: input should be greater than or equal to 1, got 0"),
        (with_(training={"lr": float("nan")}), "training.lr: input should be a finite number, got NaN"),
        (with_(training={"lr": float("inf")}), "training.lr: input should be a finite number"),
        (with_(training={"steps": "many"}), 'training.steps: input should be a valid integer, unable to parse string'),
        (with_(training={"schedule": "step"}), "training.schedule: input should be 'constant', 'linear' or 'cosine'"),
        (with_(run={"name": "a/b"}), "run.name: string should match pattern"),
        (with_(algorithm={"clip_low": 1.0}), "algorithm.gate.clip_low: input should be less than 1, got 1.0"),
        (with_(sampling={"temperature": 0}), "sampling.temperature: input should be greater than 0, got 0"),
    ],
)  # fmt: skip
def test_refusals_give_the_rule_and_the_value(values: dict[str, Any], message: str) -> None:
    assert message in refused(values)


def test_an_unknown_key_hides_no_wrong_value() -> None:
    complaints = refused(with_(engine={"kind": "proces", "kinds": 1}, training={"steps": 0})).splitlines()
    assert [line.split()[0] for line in complaints] == ["unknown", "training.steps:", "engine.kind:"]


@pytest.mark.parametrize(
    "values",
    [
        with_(algorithm={"dual_clip": 1.21}),
        with_(training={"minibatches": 8}),
        with_(algorithm={"overlong_buffer": 64}),
        with_(algorithm={"preset": "dapo"}, pipeline={"refill": 3}),
        with_(engine={"count": 2, "kind": "process"}),
        with_(eval={"samples": 4, "temperature": 0.5}),
        with_(training={"group_size": 2}),
    ],
)
def test_just_inside_the_rules_is_accepted(values: dict[str, Any]) -> None:
    parse_config(values)


@pytest.mark.parametrize("values", [{}, {"run": {"name": "x"}}])
def test_a_recipe_without_data_is_told_so_in_one_short_line(values: dict[str, Any]) -> None:
    assert refused(values) == "data needs exactly one of task, gym, path, hub, got none"


@pytest.mark.parametrize("values", [[], 5, "x", None])
def test_what_is_no_mapping_is_a_config_error(values: Any) -> None:
    refused(values)


def test_config_is_frozen() -> None:
    config = parse_config(MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        config.training.steps = 5  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.training = config.training  # type: ignore[misc]


# Overrides.


def overridden(*overrides: str) -> RLConfig:
    return override_config(parse_config(MINIMAL), overrides)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.steps=7", 7),
        ("training.lr=3e-6", 3e-6),
        ("training.lr=1", 1.0),
        ("model.plain=true", True),
        ("training.betas=[0.8, 0.95]", (0.8, 0.95)),
        ("model.path=owner/name", "owner/name"),
        ("model.path='owner/name'", "owner/name"),
        (' model.path = "owner/name" ', "owner/name"),
        ("sampling.stop=['\\n', '###']", ("\\n", "###")),
        ('sampling.stop=["\\n"]', ("\n",)),
        ("data.answer_after=####", "####"),
        ("data.instruction=Say {question} = what?", "Say {question} = what?"),
        ("data.system=", ""),
        ("data.params={count = 4, descending = true}", {"count": 4, "descending": True}),
    ],
)
def test_override_values(override: str, expected: Any) -> None:
    section, key = override.partition("=")[0].strip().split(".")
    got = getattr(getattr(overridden(override), section), key)
    assert got == expected
    assert type(got) is type(expected)


def test_overrides_of_nested_params() -> None:
    config = overridden("data.params.count=4", "data.params.descending=true", "verifier.params.ignore_case=true")
    assert config.data.params == {"count": 4, "descending": True}
    assert config.verifier.params == {"ignore_case": True}


@pytest.mark.parametrize(
    "overrides", [*itertools.permutations(["data.task=sort", "data.params.count=4", "run.seed=1"])]
)
def test_a_new_source_replaces_the_old_one_in_any_order_of_overrides(tmp_path: Path, overrides: list[str]) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[data]\ntask = "reverse"\nparams = {digits = 3}\n')
    data = load_config(recipe, overrides).data
    assert (data.task, data.params) == ("sort", {"count": 4})
    data = load_config(recipe, ["data.path=x.jsonl", "data.hub_files=a*"]).data
    assert (data.task, data.path, data.params, data.hub_files) == (None, "x.jsonl", {}, "a*")


def test_two_sources_at_once_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[data]\ntask = "reverse"\n')
    with pytest.raises(ConfigError, match="exactly one of task, gym, path, hub, got task and path"):
        load_config(recipe, ["data.task=sort", "data.path=x.jsonl"])
    with pytest.raises(ConfigError, match="got task and path"):
        overridden("data.path=x.jsonl", "data.task=sort")


def test_another_source_does_not_keep_the_old_one_s_held_out_file(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[data]\npath = "a.jsonl"\neval_path = "b.jsonl"\n')
    assert load_config(recipe, ["data.task=sort"]).data.eval_path is None
    assert load_config(recipe, ["data.path=c.jsonl"]).data.eval_path == "b.jsonl"
    assert load_config(recipe, ["data.eval_path=c.jsonl", "data.task=sort"]).data.eval_path == "c.jsonl"


def test_every_foreign_name_leads_to_a_setting_that_exists() -> None:
    paths = {path.removesuffix(".name") for path in parse_config(MINIMAL).flat()}
    paths |= {f"{table}.{key}" for table, keys in _settings(RLConfig).items() for key in keys}
    assert [name for names in ELSEWHERE.values() for name in names.split(", ") if name not in paths] == []


def test_every_earlier_name_leads_to_a_setting_of_some_kind_of_run() -> None:
    settings = [_settings(root) for root in ROOTS.values()]
    there = {f"{table}.{key}" for tables in settings for table, keys in tables.items() for key in keys}
    assert {new for new in RENAMED.values() if new not in there} == set()
    assert not {*RENAMED, *DECIDED} & there
    for old, new in RENAMED.items():
        assert hint(old, settings[0]) == f"; it is {new} now"


@pytest.mark.parametrize("task", TASKS)
def test_a_task_brings_its_verifier_unless_one_is_named(task: str) -> None:
    assert parse_config({"data": {"task": task}}).verifier.name == TASKS[task].verifier
    mine = {"name": "math", "timeout": 3.0}
    assert parse_config({"data": {"task": task}, "verifier": mine}).verifier.name == "math"
    assert parse_config({"data": {"task": task}, "verifier": {"timeout": 3.0}}).verifier.timeout == 3.0


def test_later_overrides_win() -> None:
    assert overridden("training.steps=1", "training.steps=2").training.steps == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=3", "section.key=value, got 'steps=3'; did you mean training.steps?"),
        ("lr=3", "got 'lr=3'; did you mean training.lr?"),
        ("beta=0.1", "got 'beta=0.1'; Kitae calls it algorithm.kl.coef"),
        ("batch_size=4", "got 'batch_size=4'; Kitae calls it training.prompts_per_step"),
        ("use_vllm=true", "got 'use_vllm=true'; not supported: "),
        ("rollout.n=8", "unknown key rollout.n; Kitae calls it training.group_size"),
        ("xyzzy=3", "section.key=value, got 'xyzzy=3'"),
        ("training.steps", "section.key=value, got 'training.steps'"),
        ("=3", "section.key=value, got '=3'"),
        ("training.=3", "section.key=value"),
        (".steps=3", "section.key=value"),
        ("training..steps=3", "section.key=value"),
        ("", "section.key=value, got ''"),
        ("training.steps.more=3", "'training.steps.more' goes below 'steps', which is a value, not a section"),
        ("training.stepz=3", "unknown key training.stepz; did you mean training.steps?"),
        ("trainin.steps=3", "unknown section 'trainin'; did you mean 'training'?"),
        ("training.steps=three", "training.steps: input should be a valid integer"),
        ("data.params=3", "data.params"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden(override)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["12", "1e3", "2024-01-01", "true", "3.50"])
def test_a_bare_word_that_looks_like_something_else_is_text_where_text_is_wanted(text: str) -> None:
    assert overridden(f"run.name={text}").run.name == text


# Files.


def test_load_config_names_the_run_after_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "sorting.toml"
    recipe.write_text('[data]\ntask = "sort"\n[training]\nsteps = 5\n')
    config = load_config(recipe, ["training.steps=6", "data.params.count=4"])
    assert (config.run.name, config.training.steps, config.data.params) == ("sorting", 6, {"count": 4})
    assert load_config(recipe, ["run.name=other"]).run.name == "other"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no recipe file"),
        (b"[data\ntask = 1", "is not valid TOML: "),
        (b"\xff\xfe\x00", "is not valid TOML: "),
        (b"run = 3\n[data]\ntask = 'sort'\n", "'run' is a section, got the value 3"),
        (b"data = 'sort'\n", "'data' is a section, got the value 'sort'"),
    ],
    ids=["missing", "bad TOML", "binary", "run is a value", "data is a value"],
)
def test_recipes_that_cannot_be_read(tmp_path: Path, content: bytes | None, message: str) -> None:
    recipe = tmp_path / "bad.toml"
    if content is not None:
        recipe.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(recipe)
    assert message in str(caught.value)


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recipe file"):
        load_config(tmp_path)


@pytest.mark.parametrize("recipe", sorted((PACKAGE / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid(recipe: Path) -> None:
    assert load_config(recipe).run.name == recipe.stem


@settings(deadline=None, max_examples=40)
@given(
    st.fixed_dictionaries(
        {
            "data": st.fixed_dictionaries(
                {"task": st.just("sort")},
                optional={
                    "params": st.dictionaries(st.text(max_size=3), st.integers() | st.booleans() | st.text(max_size=3)),
                    "system": st.none() | st.text(max_size=5),
                },
            ),
            "training": st.fixed_dictionaries(
                {}, optional={"lr": st.floats(1e-9, 1e3), "steps": st.integers(1, 10**9)}
            ),
            "sampling": st.fixed_dictionaries({}, optional={"stop": st.lists(st.text(max_size=3), max_size=3)}),
            "algorithm": st.fixed_dictionaries(
                {"preset": st.sampled_from(sorted(PRESETS))},
                optional={"entropy": st.fixed_dictionaries({"coef": st.floats(0, 10)})},
            ),
        }
    )
)
def test_saved_config_reads_back_equal(values: dict[str, Any]) -> None:
    if (preset := values["algorithm"]["preset"]) in ("distil", "gkd"):
        values |= {"method": {"kind": "distil", "teacher": "tiny", "loss": "jsd" if preset == "gkd" else "reverse-kl"}}
    config = parse_config({**values, "env": {"name": "games"}})  # some presets are for several turns
    again = parse_config(json.loads(config.to_json()))
    assert again == config
    assert again.flat() == config.flat()


def test_flat_names_every_setting() -> None:
    flat = parse_config(MINIMAL).flat()
    functions = {"overlong_buffer", "length_penalty", "bias", "scale", "clip"}
    functions = {f"algorithm.shaping.{key}" for key in functions} | {
        "algorithm.advantage.ddof", "algorithm.advantage.epsilon", "algorithm.gate.clip_low",
        "algorithm.gate.clip_high", "algorithm.gate.dual_clip", "algorithm.correction.floor",
        "algorithm.correction.cap",
    }  # fmt: skip
    assert set(flat) == set(dict(RLConfig.usual())) | functions
    assert flat["training.betas"] == [0.9, 0.99]
    assert (flat["algorithm.gate.name"], flat["algorithm.gate.clip_low"], flat["data.params"]) == ("clip", 0.2, {})


def test_what_differs_from_the_defaults_is_told_by_paths() -> None:
    algorithm = {"preset": "dapo", "gate": {"clip_high": 0.3}, "filter": "none"}
    config = parse_config({"data": {"task": "sort", "columns": {"prompt": "q"}}, "algorithm": algorithm})
    assert config.changed() == {
        "data.task": "sort",
        "data.columns.prompt": "q",
        "algorithm.preset": "dapo",
        "algorithm.filter.name": "none",
        "algorithm.gate.clip_high": 0.3,
    }
    assert parse_config(MINIMAL).changed() == {"data.task": MINIMAL["data"]["task"]}


# Every setting does something and says what.


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_and_setting_is_described(section: str) -> None:
    cls = SECTIONS[section]
    assert cls.__doc__
    for kind in (cls, *cls.tables().values()):
        assert kind.__doc__
        own = [key for key, info in kind.model_fields.items() if not info.description and key not in kind.tables()]
        assert own in ([], ["name"]), "the name of a stage's function is described with its choices"


@cache
def reads() -> set[tuple[str, str]]:
    """`(section, key)` of every setting that the code reads, config.py and presets.py apart.

    A read is an attribute of something known to be a section: `….config.training.steps`; `t.steps` in a file that
    says `t = ….config.training`; `config.steps` in a file with a parameter `config: TrainingConfig`.
    """
    found = {("algorithm", key) for stage in STAGES.values() for key in (stage.key, "params", "preset")}
    for stage in STAGES.values():  # settings of a stage function are its keywords
        found |= {("algorithm", key) for f in stage.choices.values() for key in keyword_settings(f)}
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("config.py", "presets.py"):
            walked = ast.walk(ast.parse(path.read_text()))
            nodes = [node for node in walked if isinstance(node, ast.arg | ast.Assign | ast.Attribute)]
            for section, cls in SECTIONS.items():
                names = _names_of(section, {base.__name__ for base in cls.__mro__}, nodes)
                attributes = (
                    node for node in nodes if isinstance(node, ast.Attribute) and node.attr in cls.model_fields
                )
                found |= {(section, node.attr) for node in attributes if _is_section(node.value, section, names)}
    return found


def _names_of(section: str, class_names: set[str], nodes: list[ast.AST]) -> set[str]:
    """The variables of a file that hold this section."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id in class_names:
            names.add(node.arg)
    for node in nodes:
        if isinstance(node, ast.Assign):
            targets, values = node.targets, [node.value]
            if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                targets, values = targets[0].elts, node.value.elts
            for target, value in zip(targets, values, strict=False):
                if isinstance(target, ast.Name) and _is_section(value, section, names):
                    names.add(target.id)
    return names


def _is_section(node: ast.expr, section: str, names: set[str]) -> bool:
    whole = isinstance(node, ast.Attribute) and node.attr == section and _last_name(node.value) == "config"
    return whole or _last_name(node) in names


def _last_name(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def unread(sections: Mapping[str, type[Section]]) -> list[str]:
    known = reads()
    return [f"{name}.{key}" for name, cls in sections.items() for key in cls.model_fields if (name, key) not in known]


def test_every_setting_is_read_somewhere() -> None:
    assert unread(SECTIONS) == []


def test_a_setting_that_nothing_reads_would_be_found() -> None:
    """Also one whose name is read of another section: `every` and `steps` are everywhere."""
    for name in ("xyzzy", "every", "top_p"):
        more = create_model("TrainingConfig", __base__=SECTIONS["training"], **{name: (int, 0)})  # type: ignore[call-overload]
        assert unread({**SECTIONS, "training": more}) == [f"training.{name}"]


def test_importing_settings_is_cheap() -> None:
    code = "import sys, kitae.config.recipe; print({'torch', 'transformers', 'sympy', 'pyarrow'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
