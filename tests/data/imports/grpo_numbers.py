# Two rewards with weights, one async, rows changed by map, adapters, a main that is guarded by nothing.
import asyncio

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

SYSTEM = "Answer with a number."


def as_prompt(row):
    return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["problem"]}]}


def right(prompts, completions, solution, **kwargs):
    said = [completion[-1]["content"] for completion in completions]
    return [None if s is None else float(str(s) in text) for text, s in zip(said, solution, strict=True)]


async def short(completions, completion_ids, log_metric=None, **kwargs):
    await asyncio.sleep(0)
    lengths = [len(ids) for ids in completion_ids]
    if log_metric is not None:
        log_metric("longest", max(lengths))
    return [1.0 if n < 12 else 0.0 for n in lengths]


rows = load_dataset("json", data_files={"train": "problems.jsonl"})["train"]
rows = rows.map(as_prompt, remove_columns=["problem"])
trainer = GRPOTrainer(
    model="tiny",
    reward_funcs=[right, short],
    args=GRPOConfig(
        "numbers",
        loss_type="dr_grpo",
        scale_rewards=False,
        reward_weights=[1.0, 0.25],
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=16,
        max_steps=2,
        use_vllm=True,
        vllm_mode="colocate",
        seed=7,
    ),
    train_dataset=rows,
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
