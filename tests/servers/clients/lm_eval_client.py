"""lm-eval over HTTP and by its own `hf` backend, on the same small tasks from local files: prints how far they differ.

lm_eval_client.py ADDRESS MODEL-NAME MODEL-FOLDER SCRATCH-FOLDER
"""

import json
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

ADDRESS, NAME, FOLDER, SCRATCH = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])

QUESTIONS = [
    ("The capital of France is", ["Paris", "London", "Rome"], 0),
    ("Water freezes at zero degrees", ["Celsius", "metres", "volts"], 0),
    ("Two plus two is", ["five", "four", "nine"], 1),
    ("The opposite of hot is", ["cold", "warm", "wet"], 0),
    ("A week has", ["seven days", "ten days"], 0),
    ("The sun rises in the", ["west", "north", "east"], 2),
    ("Bees make", ["milk", "honey — of course", "wine"], 1),
    ("Émile Zola wrote in", ["French", "Japanese 日本語"], 0),
]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
""",
    "likelihood": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{choices[answer]}}"
metric_list:
  - metric: acc
""",
    "words": """
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 12
  do_sample: false
  temperature: 0
metric_list:
  - metric: exact_match
""",
}


def write_tasks() -> None:
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    data = SCRATCH / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, body in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
        head = f"task: kitae_{name}\n{source}"
        (SCRATCH / f"{name}.yaml").write_text(head + body.lstrip())


def answers(model: str, arguments: str, batch: int) -> dict[str, list]:
    found = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[f"kitae_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(SCRATCH), include_defaults=False),
        batch_size=batch,
        log_samples=True,
        bootstrap_iters=0,
    )
    return {
        name: [[one[0] if isinstance(one, list) else one for one in row["resps"]] for row in samples]
        for name, samples in found["samples"].items()
    }


def main() -> None:
    write_tasks()
    address = f"base_url={ADDRESS}/completions,model={NAME},tokenizer={FOLDER},num_concurrent=4,max_retries=2"
    served = answers("local-completions", address, 2)
    own = answers("hf", f"pretrained={FOLDER},dtype=float32,device=cpu", 4)
    gap, greedy, same = 0.0, True, True
    for name in own:
        for mine, theirs in zip(served[name], own[name], strict=True):
            for a, b in zip(mine, theirs, strict=True):
                if name == "kitae_words":
                    same &= a == b
                else:
                    gap = max(gap, abs(float(a[0]) - float(b[0])))
                    greedy &= a[1] in (b[1], str(b[1]))
    print(json.dumps({"gap": gap, "greedy": greedy, "texts": same, "asked": sum(map(len, own.values()))}))


main()
