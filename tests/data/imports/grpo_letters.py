# The shape of a first script for TRL: a reward in the script, settings in a config, everything at the top level.
import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("json", data_files="prompts.jsonl", split="train")
VOWELS = re.compile("[aeiou]")


def count(text):
    return len(VOWELS.findall(text))


def vowels(completions, **kwargs):
    return [count(completion[0]["content"]) / 16 for completion in completions]


args = GRPOConfig(
    output_dir="letters",
    learning_rate=1e-4,
    per_device_train_batch_size=16,
    num_generations=8,
    max_completion_length=8 * 2,
    max_steps=3,
    beta=0.04,
    logging_steps=1,
    top_p=0.9,
)
trainer = GRPOTrainer(model="tiny", reward_funcs=vowels, args=args, train_dataset=dataset)
trainer.train()
