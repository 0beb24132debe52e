"""What becomes of the settings of other trainers: every key has its line, and recipes say what peers do by default."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kitae.config.recipe import make_config
from kitae.errors import ConfigError
from kitae.importers import openrlhf, prime_rl, trl, verl
from kitae.importers.command_lines import parse_flags, split_command
from kitae.importers.translation import Translation
from kitae.importers.trl_rewards import Reward

FILES = Path(__file__).parents[2] / "data" / "imports"


def at(t: Translation, path: str) -> Any:
    place: Any = t.recipe
    for key in path.split("."):
        place = place[key]
    return place


def outcomes(t: Translation) -> dict[str, str]:
    return {line.key: line.outcome for line in t.lines()}


def grpo(**given: Any) -> Translation:
    return trl.translate("grpo", {"model": "tiny", "max_steps": 4, **given}, {})


# Of all peers.


SOURCES = {
    "grpo_letters.py": trl,
    "grpo_numbers.py": trl,
    "sft_main.py": trl,
    "verl_grpo.sh": verl,
    "verl_ppo.yaml": verl,
    "openrlhf.sh": openrlhf,
    "prime.toml": prime_rl,
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_key_has_a_line_and_the_recipe_is_valid(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    t = SOURCES[name].read(str(FILES / name), [], tmp_path / "recipe.toml")
    assert {line.key for line in t.lines()} >= set(t.given), "nothing is dropped silently"
    make_config(t.recipe)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(t.toml())
    from kitae.config.recipe import read_recipe

    assert read_recipe(recipe) == {**t.recipe, "run": {"name": "recipe", **t.recipe.get("run", {})}}


@pytest.mark.parametrize(
    ("name", "key", "outcome"),
    [
        ("grpo_letters.py", "top_p", "mapped"),
        ("grpo_letters.py", "logging_steps", "nothing"),
        ("grpo_letters.py", "lr_scheduler_type", "default"),
        ("grpo_numbers.py", "use_vllm", "mapped"),
        ("grpo_numbers.py", "vllm_importance_sampling_mode", "default"),
        ("verl_ppo.yaml", "actor_rollout_ref.rollout.top_p", "mapped"),
        ("verl_ppo.yaml", "trainer.critic_warmupp", "unknown"),
        ("verl_ppo.yaml", "actor_rollout_ref.actor.clip_ratio_c", "mapped"),
        ("openrlhf.sh", "reward.remote_ulr", "unknown"),
        ("openrlhf.sh", "actor.lr_warmup_ratio", "default"),
        ("openrlhf.sh", "ds.zero_stage", "nothing"),
        ("prime.toml", "orchestrator.buffer.seed", "unknown"),
        ("prime.toml", "trainer.loss.type", "default"),
        ("prime.toml", "inference.gpu_memory_utilization", "nothing"),
    ],
)
def test_outcomes(name: str, key: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problems.jsonl").write_text('{"problem": "1 + 1", "solution": "2"}\n' * 8)
    found = outcomes(SOURCES[name].read(str(FILES / name), [], tmp_path / "recipe.toml"))
    if outcome == "mapped" and key not in found:
        return  # a default that is Kitae's too
    assert found[key] == outcome


# TRL.


def test_defaults_of_trl_are_in_the_recipe() -> None:
    t = grpo()
    assert at(t, "algorithm.aggregation") == "token-mean", "the loss is dapo"
    assert at(t, "algorithm.advantage") == {"name": "group-zscore", "epsilon": 1e-4}
    assert at(t, "algorithm.correction") == "none" and "kl" not in t.recipe["algorithm"]
    assert at(t, "training.schedule") == "linear" and at(t, "training.betas") == [0.9, 0.999]
    assert (at(t, "training.prompts_per_step"), at(t, "training.group_size")) == (1, 8), "a batch counts sequences"


def test_batches_of_trl_count_sequences() -> None:
    t = grpo(per_device_train_batch_size=8, gradient_accumulation_steps=4, steps_per_generation=8, num_generations=4,
             num_iterations=2, max_steps=40)  # fmt: skip
    training = t.recipe["training"]
    assert (training["prompts_per_step"], training["minibatches"], training["epochs"]) == (16, 2, 2)
    assert training["steps"] == 10, "TRL counts optimizer steps, four of each batch"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"importance_sampling_level": "sequence"}, "epsilon"),
        ({"loss_type": "cispo"}, "epsilon_high"),
        ({"delta": 1.1}, "delta"),
        ({"rollout_func": [Reward("roll", place="w.py:roll")]}, "rollout_func"),
        ({"fp16": True}, "fp16"),
        ({"beta": 0.1, "importance_sampling_level": "sequence", "epsilon": 3e-4}, "use_bias_correction_kl"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type"),
    ],
)
def test_what_trl_has_and_kitae_has_not_is_refused_with_another_way(given: dict[str, Any], key: str) -> None:
    lines = {line.key: line for line in grpo(**given).lines()}
    assert lines[key].outcome == "refused" and lines[key].here
    make_config({**grpo(**given).recipe, "data": {"task": "reverse"}})


def test_functions_of_a_script_that_trains_are_copied_with_what_they_need(tmp_path: Path) -> None:
    t = trl.read(str(FILES / "grpo_letters.py"), [], tmp_path / "run.toml")
    file = tmp_path / "run_functions.py"
    assert at(t, "verifier.name") == f"{file}:vowels" and at(t, "verifier.style") == "trl"
    (text,) = t.files.values()
    assert "import re" in text and "VOWELS" in text and "def count" in text
    assert "GRPOConfig" not in text and "load_dataset" not in text
    file.write_text(text)
    code = "import run_functions as f; print(f.vowels([[{'content': 'banana'}]]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[0.1875]\n"


def test_rows_that_a_script_maps_are_read_by_its_function(tmp_path: Path) -> None:
    t = trl.read(str(FILES / "grpo_numbers.py"), [], tmp_path / "run.toml")
    (text,) = t.files.values()
    room: dict[str, Any] = {}
    exec(text, room)
    made = room["read_row"]({"problem": "1 + 1", "solution": "2"})
    assert made["question"][1]["content"] == "1 + 1" and made["reference"] == "2"
    assert made["context"]["solution"] == "2" and made["context"]["prompt"] == made["question"]
    assert at(t, "data.format").endswith("_functions.py:read_row")
    assert at(t, "verifier.params.weights") == [1.0, 0.25] and at(t, "verifier.params.tokenizer") == "tiny"
    assert at(t, "model.lora_rank") == 4 and at(t, "model.lora_targets") == "q_proj,v_proj"
    assert at(t, "algorithm.correction") == {"name": "sequence-mask", "bottom": 0.0, "cap": 3.0}, "vLLM's default"


def test_a_script_behind_a_main_is_referred_to(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from trl import GRPOConfig, GRPOTrainer\n\ndef reward(completions, **kwargs):\n    return [0.0]\n\n"
        "if __name__ == '__main__':\n"
        "    trainer = GRPOTrainer('tiny', reward, args=GRPOConfig('x', max_steps=1), train_dataset=make())\n"
    )
    t = trl.read(str(script), [], tmp_path / "run.toml")
    assert at(t, "verifier.name") == f"{script}:reward" and not t.files
    assert outcomes(t)["train_dataset"] == "refused", "what code makes is said"


def test_rows_that_code_makes_are_read_as_trl_reads_them(tmp_path: Path) -> None:
    """Once they are in a file: chats stay chats, for rewards that read `completion[0]["content"]`."""
    script = tmp_path / "train.py"
    script.write_text(
        "from datasets import Dataset\nfrom trl import GRPOTrainer\n\n"
        "def reward(completions, **kwargs):\n    return [0.0]\n\n"
        "data = Dataset.from_list([{'prompt': [{'role': 'user', 'content': str(i)}]} for i in range(4)])\n"
        "GRPOTrainer(model='tiny', reward_funcs=reward, train_dataset=data).train()\n"
    )
    t = trl.read(str(script), [], tmp_path / "run.toml")
    assert at(t, "data.format") == "trl" and outcomes(t)["train_dataset"] == "refused"


def test_command_lines_of_trl(tmp_path: Path) -> None:
    config = tmp_path / "dpo.yaml"
    config.write_text("model_name_or_path: tiny\ndataset_name: pairs.jsonl\nlearning_rate: 5e-7\nbeta: 0.2\n")
    t = trl.read(f"trl dpo --config {config} --beta 0.3 --loss_type ipo", [], tmp_path / "x.toml")
    assert t.kind == "dpo" and at(t, "method.beta") == 0.3 and at(t, "method.loss") == "ipo-token"
    assert at(t, "training.lr") == 5e-7 and at(t, "data.max_tokens") == 1024 and at(t, "data.too_long") == "truncate"
    with pytest.raises(ConfigError, match=r"may be for .*dpo.*: say which"):
        trl.read(str(config), [], tmp_path / "x.toml")


def test_own_rewards_of_trl(tmp_path: Path) -> None:
    names = [Reward(name, "trl.rewards") for name in ("accuracy_reward", "think_format_reward")]
    parts = at(grpo(reward_funcs=names, reward_weights=[1.0, 0.5]), "verifier.params.parts")
    assert [(part["name"], part["weight"]) for part in parts] == [("math", 1.0), ("regex", 0.5)]
    soft = Reward("get_soft_overlong_punishment", "trl.rewards", arguments={"soft_punish_cache": 100})
    assert at(grpo(reward_funcs=[names[0], soft]), "algorithm.shaping.overlong_buffer") == 100
    assert outcomes(grpo(reward_funcs=[Reward("get_repetition_penalty_reward", "trl.rewards")]))[
        "reward_funcs"
    ] == "refused"  # fmt: skip


def test_tools_and_environments_of_trl() -> None:
    t = grpo(tools=[Reward("weather", place="t.py:weather")], reward_funcs=[Reward("f", place="t.py:f")])
    assert at(t, "env.name") == "tools" and at(t, "env.params.tools") == ["t.py:weather"]
    t = grpo(environment_factory=[Reward("World", place="w.py:World")])
    assert at(t, "env.params.tools") == ["w.py:World"] and at(t, "verifier.name") == "none", "the class gives rewards"


def test_functions_inside_a_main_are_copied(tmp_path: Path) -> None:
    """As in TRL's own examples: settings from a command line, rows mapped and rewards defined below the main guard."""
    script = tmp_path / "gspo.py"
    script.write_text(
        "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer, TrlParser\n"
        "if __name__ == '__main__':\n"
        "    args, training_args, model_args = TrlParser((GRPOConfig,)).parse_args_and_config()\n"
        "    train, test = load_dataset('AI/Math', split=['train[:5%]', 'test'])\n"
        "    SYSTEM = 'Think.'\n"
        "    def ask(row):\n        return {'prompt': [{'role': 'system', 'content': SYSTEM}]}\n"
        "    def right(completions, solution, **kwargs):\n        return [1.0 for _ in completions]\n"
        "    train = train.map(ask)\n"
        "    training_args.scale_rewards = 'none'\n"
        "    trainer = GRPOTrainer(model_args.model_name_or_path or 'base', args=training_args, reward_funcs=right,\n"
        "                          train_dataset=train, eval_dataset=test, peft_config=get_peft_config(model_args))\n"
    )
    t = trl.read(f"accelerate launch --config_file zero3.yaml {script} --model_name_or_path tiny --max_steps 2 "
                 '--lora_target_modules "q_proj", "v_proj" --use_peft', [], tmp_path / "run.toml")  # fmt: skip
    (text,) = t.files.values()
    assert "SYSTEM = 'Think.'" in text and text.count("def ") == 3, "two functions and the reader of rows"
    assert at(t, "model.path") == "tiny" and at(t, "model.lora_targets") == "q_proj,v_proj"
    assert at(t, "data.hub") == "AI/Math" and outcomes(t)["train_dataset"] == "near", "a slice of a split is said"
    assert at(t, "algorithm.advantage") == "group-centred", "attributes that are set later count"
    assert "config_file" not in t.given, "of accelerate"


# verl.


def test_defaults_of_verl_are_in_the_recipe() -> None:
    t = verl.translate({"trainer.total_training_steps": 3})
    assert at(t, "algorithm.advantage.name") == "gae" and at(t, "algorithm.advantage.whiten") == "tokens"
    assert at(t, "algorithm.gate") == {"name": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert at(t, "algorithm.aggregation") == "token-mean"
    assert at(t, "training.prompts_per_step") == 1024 and at(t, "training.minibatches") == 4, "batches count prompts"
    assert at(t, "verifier.name") == "verl" and at(t, "data.format") == "verl"


def test_overrides_of_verl_win(tmp_path: Path) -> None:
    t = verl.read(str(FILES / "verl_ppo.yaml"), ["algorithm.adv_estimator=grpo", "+data.seed=3"], tmp_path / "x.toml")
    assert at(t, "algorithm.advantage") == {"name": "group-zscore"} and at(t, "run.seed") == 3
    assert outcomes(t)["critic.optim.lr"] == "nothing", "there is no critic now"
    with pytest.raises(ConfigError, match="form key=value"):
        verl.read(str(FILES / "verl_ppo.yaml"), ["grpo"], tmp_path / "x.toml")


def test_a_composed_file_of_verl_has_references_that_are_no_values(tmp_path: Path) -> None:
    file = tmp_path / "full.yaml"
    file.write_text(
        "actor_rollout_ref:\n  rollout:\n    name: ???\n    prompt_length: ${data.max_prompt_length}\n    n: 4\n"
    )
    t = verl.read(str(file), [], tmp_path / "x.toml")
    assert set(t.given) == {"actor_rollout_ref.rollout.n"}


# OpenRLHF and prime-rl.


def test_batches_of_openrlhf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problems.jsonl").write_text('{"problem": "1 + 1", "solution": "2"}\n' * 8)
    t = openrlhf.read(str(FILES / "openrlhf.sh"), [], tmp_path / "x.toml")
    training = t.recipe["training"]
    assert (training["prompts_per_step"], training["minibatches"], training["steps"]) == (4, 2, 2)
    assert at(t, "algorithm.kl") == {"name": "k2", "coef": 1e-3} and at(t, "algorithm.gate.clip_high") == 0.27
    assert at(t, "verifier.style") == "openrlhf" and at(t, "data.columns") == {
        "prompt": "problem",
        "answer": "solution",
    }
    with pytest.raises(ConfigError, match="reads train_ppo_ray, got train_sft"):
        openrlhf.read("python3 -m openrlhf.cli.train_sft --model x", [], tmp_path / "x.toml")


def test_the_loss_of_prime_rl_is_a_region_around_what_sampled(tmp_path: Path) -> None:
    t = prime_rl.read(str(FILES / "prime.toml"), [], tmp_path / "x.toml")
    assert at(t, "algorithm.gate") == {
        "name": "divergence-mask", "tv_limit": 0.3, "both_sides": True, "ratio_cap": 1e4
    }  # fmt: skip
    assert at(t, "algorithm.ratio.anchor") == "behaviour" and at(t, "algorithm.advantage") == "group-centred"
    assert at(t, "training.prompts_per_step") == 2, "a batch counts rollouts"
    assert at(t, "env.params.environment") == "guess_v1" and at(t, "env.params.args") == {"count": 8}
    assert at(t, "pipeline.max_staleness") == 2


# Command lines.


def test_words_and_flags() -> None:
    words = split_command("run --lr 1e-5 --flag --betas 0.9 0.95 --name=x --list '[1, 2]' --none null")
    assert parse_flags(words) == {
        "lr": 1e-5, "flag": True, "betas": [0.9, 0.95], "name": "x", "list": [1, 2], "none": None
    }  # fmt: skip
    with pytest.raises(ConfigError, match="must be one for a shell"):
        split_command("run 'half")


def test_arrays_and_branches_of_shell_scripts(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        'N=${N:-4}\nDIR=${DIR:-$N/x}\ncase "$D" in\n  npu)\n    N=99\n    ;;\nesac\nARGS=(\n  --n ${N}\n  # --m 3\n'
        "  --dir $DIR\n)\nray job submit -- python -m x ${ARGS[@]} --last\n"
    )
    assert parse_flags(split_command(str(script))) == {"n": 4, "dir": "4/x", "last": True}


def test_variables_of_shell_scripts(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('N=4\nexport M="tiny"  # a model\ntrain --n ${N} \\\n  --model $M --k ${K:-7} --other $NOWHERE\n')
    flags = parse_flags(split_command(str(script)))
    assert flags == {"n": 4, "model": "tiny", "k": 7, "other": "$NOWHERE"}


def test_older_examples_of_prime_rl_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its first example has it: sampling beside the environment, and a tracker that need not be installed."""
    (tmp_path / "rl.toml").write_text(
        "max_steps = 20\nseq_len = 2048\n[model]\nname = 'lab/model'\n[wandb]\nproject = 'first'\n[orchestrator]\n"
        "batch_size = 128\nrollouts_per_example = 16\n[orchestrator.sampling]\nmax_tokens = 128\n"
        "[[orchestrator.env]]\nid = 'reverse-text'\n[inference]\n"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    t = prime_rl.read(str(tmp_path / "rl.toml"), [], tmp_path / "x.toml")
    assert (at(t, "sampling.max_tokens"), at(t, "training.group_size"), at(t, "training.prompts_per_step")) == (
        128,
        16,
        8,
    )
    assert at(t, "env.params.environment") == "reverse-text" and at(t, "env.params.python") == ".venv/bin/python"
    assert "wandb is not installed here" in str(next(line for line in t.lines() if line.key == "wandb.project"))
