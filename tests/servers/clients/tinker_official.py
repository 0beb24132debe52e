"""Tinker's own client, unmodified: python tinker_official.py ADDRESS MODEL. What it finds is JSON on the last line."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("TINKER_API_KEY", "tml-test")
import tinker
from tinker import types

ADDRESS, MODEL = sys.argv[1:3]
TEXT = list(range(5, 25))
INPUT = types.ModelInput.from_ints


def datum(**inputs: Any) -> types.Datum:
    return types.Datum(model_input=INPUT(TEXT[:-1]), loss_fn_inputs={"target_tokens": TEXT[1:], **inputs})


LEARN = datum(weights=[1.0] * 19)
SCORED = datum(logprobs=[-2.0] * 19, advantages=[0.0] * 9 + [1.0] * 10)


def train(service: tinker.ServiceClient, rank: int, steps: int = 5) -> tuple[tinker.TrainingClient, list[float]]:
    client = service.create_lora_training_client(base_model=MODEL, rank=rank, seed=rank).result()
    losses = []
    for _ in range(steps):
        passed = client.forward_backward([LEARN, LEARN], "cross_entropy")
        updated = client.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"])
        updated.result()
    return client, losses


def scores(sampler: tinker.SamplingClient) -> list[float]:
    return sampler.compute_logprobs(INPUT(TEXT)).result()[1:]


def custom(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    loss = -sum(each.sum() for each in logprobs)
    return loss, {"mine": loss.item()}


def refused(work: Any) -> str:
    try:
        work()
    except tinker.TinkerError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    service = tinker.ServiceClient(base_url=ADDRESS)
    client, losses = train(service, 8)
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, seed=3)
    asked: dict[str, Any] = {"prompt": INPUT(TEXT[:5]), "num_samples": 2, "sampling_params": params}
    drawn = sampler.sample(**asked, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    forward = client.forward([LEARN], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    kinds = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")
    sums = {kind: client.forward([SCORED], kind).result().metrics["loss:sum"] for kind in kinds}
    own = client.forward_backward_custom([LEARN], custom).result().metrics
    saved = client.save_state("one").result().path
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    with ThreadPoolExecutor(2) as threads:  # two services, so two sessions
        pair = list(threads.map(lambda rank: train(tinker.ServiceClient(base_url=ADDRESS), rank)[0], (2, 4)))
    together = [scores(each.save_weights_and_get_sampling_client().result()) for each in pair]
    alone = [scores(train(service, rank)[0].save_weights_and_get_sampling_client().result()) for rank in (2, 4)]
    rest = tinker.RestClient(base_url=ADDRESS)
    found = {
        "losses": losses,
        "gap": max(abs(a - b) for a, b in zip(scores(sampler), forward, strict=True)),
        "tokens": [len(sequence.tokens) for sequence in drawn.sequences],
        "prompt": len([each for each in drawn.prompt_logprobs if each is not None]),
        "top": [len(each) for each in drawn.topk_prompt_logprobs if each is not None],
        "kinds": sums,
        "custom": own["mine"] - own["loss:sum"],
        "loaded": [c.forward([LEARN], "cross_entropy").result().metrics["loss:sum"] for c in (client, again)],
        "apart": max(abs(a - b) for x, y in zip(together, alone, strict=True) for a, b in zip(x, y, strict=True)),
        "saved": [c.checkpoint_id for c in rest.list_checkpoints(client.model_id).result().checkpoints][-2:],
        "refused": refused(lambda: client.forward_backward([LEARN], "mine").result()),
    }
    print(json.dumps(found))


main()
