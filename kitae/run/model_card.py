"""The README.md of an exported model: what it was trained from, by which settings, and what it scored."""

import json
from pathlib import Path
from typing import Any

import kitae
from kitae.models.fingerprint import fingerprint_files
from kitae.store.run_summary import RunView

_MOST = 20  # rows of a curve


def model_card(run: RunView, folder: Path) -> str:
    """Markdown with the front matter that model hubs read, about the files of a folder: a model, or adapters.

    Scores are those on what the run held out, and are left out where nothing was.
    """
    config = run.config
    base = config.model_dump(mode="json").get("model", {}).get("path", "")
    settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in sorted(config.changed().items()))
    files = fingerprint_files([folder])
    library = "peft" if (folder / "adapter_config.json").exists() else "transformers"
    seals = "".join(f"| `{path.rpartition('/')[2]}` | `{seal}` |\n" for path, seal in sorted(files.items()))
    parts = [
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\nbase_model: {json.dumps(base)}\n"
        f"tags: [kitae, {config.method.kind}]\n---\n",
        f"# {run.folder.name}\n",
        f"Trained from `{base}` by `{config.method.kind}` for {run.step} steps with Kitae {kitae.__version__}.\n",
        _scores(run),
        "## Settings\n\nWhat differs from the defaults; `kitae train` takes it as overrides.\n\n"
        f"```text\n{settings}```\n",
        f"## Files\n\n| file | checksum |\n|---|---|\n{seals}",
    ]
    return "\n".join(part for part in parts if part)


def merge_card(name: str, sources: list[str], weights: str | None, base: str, density: float | None) -> str:
    """Of one model that was made of others."""
    how = f"TIES on `{base}`, density {density:g}" if density is not None else "the mean of their weights"
    listed = "".join(f"- `{source}`\n" for source in sources)
    whole = how if len(sources) > 1 else "its adapters merged into its base"
    shares = f", weights {weights}" if weights else ""
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [kitae, merge]\n---\n\n# {name}\n\n"
        f"Made with Kitae {kitae.__version__}: {whole}{shares}.\n\n{listed}"
    )


def _scores(run: RunView) -> str:
    rows = [(row["step"], row["avg"], row.get("prompts")) for row in run.evaluations]
    rewards = {row["step"]: row.get("reward") for row in run.steps}
    if not rows:
        return ""
    every = -(-len(rows) // _MOST)
    kept = [row for place, row in enumerate(rows) if place % every == 0 or row is rows[-1]]
    lines = "".join(f"| {step} | {avg:.4f} | {count} | {_text(rewards.get(step))} |\n" for step, avg, count in kept)
    return f"## Scores\n\n| step | held-out mean score | prompts | reward in training |\n|---:|---:|---:|---:|\n{lines}"


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4f}"
