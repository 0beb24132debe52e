"""Tokens per second of vLLM's build for CPUs on prompts that another program made; run by `rollouts.py --vllm-python`.

    python vllm_rollouts.py MODEL PROMPTS.json GROUP TOKENS REPEATS DTYPE RATES.json

Writes one list. Every response is exactly TOKENS long, sampled at temperature 1 with the log-prob of each token.
"""

import json
import sys
import time
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    model, prompts, group, tokens, repeats, dtype, target = sys.argv[1:]
    rows = json.loads(Path(prompts).read_text())
    longest = max(map(len, rows)) + int(tokens) + 1
    llm = LLM(
        model, dtype=dtype, max_model_len=longest, max_num_seqs=len(rows) * int(group), disable_log_stats=True,
        enable_prefix_caching=True,
    )  # fmt: skip
    rates = []
    for turn in range(int(repeats) + 1):  # the first warms up
        sampling = SamplingParams(
            n=int(group), temperature=1.0, max_tokens=int(tokens), min_tokens=int(tokens), logprobs=0, seed=turn,
            ignore_eos=True, detokenize=False,
        )  # fmt: skip
        began = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        made = [len(output.token_ids) for answer in done for output in answer.outputs]
        assert len(made) == len(rows) * int(group) and set(made) == {int(tokens)}
        rates.append(sum(made) / seconds)
    Path(target).write_text(json.dumps(rates[1:]))


if __name__ == "__main__":
    main()
