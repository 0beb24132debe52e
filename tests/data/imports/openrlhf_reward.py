import torch


def reward_func(queries, prompts, labels):
    said = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([float(str(label) in text) for text, label in zip(said, labels, strict=True)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"long": torch.tensor([float(len(t)) for t in said])}}
