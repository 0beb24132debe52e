"""`kitae data`: what a recipe trains on, as the model will see it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kitae.cli.arguments import Overrides, Recipe
from kitae.cli.text import table
from kitae.config.locate import find_recipe
from kitae.config.recipe import load_config
from kitae.config.root import RLConfig, Root, StageConfig
from kitae.data.chat import Chat
from kitae.data.data_files import local_file
from kitae.data.examples import Example, found_shapes, held_out_examples, open_examples, texts_of
from kitae.data.overlap import Passage, duplicates, known_from, passages
from kitae.data.prompt_stream import eval_prompts, open_stream
from kitae.data.rendering import Rendered, Renderer
from kitae.errors import DataError
from kitae.models.load import load_tokenizer
from kitae.offline.methods import shape_of
from kitae.types import Prompt

_GENERATED = 256  # problems of a task that has no end
_ALL = 10**9
_PERCENTILES = {"least": 0, "median": 50, "90 %": 90, "99 %": 99, "most": 100}
_SHOWN = 1500  # characters of a stretch of text


@dataclass(frozen=True, slots=True)
class _Item:
    """One row of what is trained on: its name, what is said in it, and whether that is good, where the data say it."""

    id: str
    texts: Sequence[str]
    label: bool | None = None


def data(
    recipe: Recipe,
    overrides: Overrides = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="An evaluation's file to look for in the data; may be repeated.")
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="How many to show as the model sees them.")] = 3,
) -> None:
    """Inspect a recipe's data: tokens, duplicates, overlap.

    Rows, tokens, duplicates, overlap with evaluations, and examples with the trained tokens in ⟦brackets⟧.
    """
    config = load_config(find_recipe(recipe), overrides or [])
    if isinstance(config, RLConfig):
        _prompts(config, against or [], examples)
    else:
        assert isinstance(config, StageConfig)
        _examples(config, against or [], examples)


def _prompts(config: RLConfig, against: Sequence[Path], show: int) -> None:
    settings = config.data
    stream = open_stream(settings, config.run.seed)
    prompts = [stream.at(position) for position in range(stream.size or _GENERATED)]
    generated = "" if stream.size else f" (the first {_GENERATED} of an endless task)"
    print(f"source     {settings.task or settings.gym or settings.path or settings.hub}")
    print(f"prompts    {len(prompts)}{generated}")
    _note(stream.skipped)
    chat = _chat(config)
    print(f"\ntokens, by the template of {config.model.path}")
    print(_percentiles({"prompt": [len(chat.encode_prompt(prompt.messages)) for prompt in prompts]}))
    print(f"responses may have {config.sampling.max_tokens} (sampling.max_tokens)\n")
    items = [_Item(prompt.id, [_question(prompt)]) for prompt in prompts]
    _overlap(items, _held_out_prompts(config), against)
    for prompt in prompts[:show]:
        print(f"\n── {prompt.id} ──\n{_clipped(chat.spell(*chat.encode_prompt(prompt.messages)))}")
        print(f"reference: {prompt.reference!r}")


def _examples(config: StageConfig, against: Sequence[Path], show: int) -> None:
    settings, shape = config.data, shape_of(config)
    stream = open_examples(settings, config.run.seed, shape)
    examples = [example for source in stream.sources for example in source]
    rows = [
        [f"  {name}", *(f"{count} × {kind}" for kind, count in found.items())]
        for name, found in found_shapes(settings).items()
    ]
    print(f"source     {settings.source}, read for {config.method.kind} as {shape}\n" + "\n".join(map("  ".join, rows)))
    print(f"examples   {len(examples)}{_labels(examples)}")
    _note(stream.skipped)
    chat = _chat(config)
    renderer = Renderer(chat, settings.train_on, _ALL)
    rendered, refused = _rendered(examples, renderer)
    print(f"\ntokens, by the template of {config.model.path}, trained on: {settings.train_on}")
    _tokens(config, rendered)
    items = [_Item(example.id, texts_of(example), example.label) for example in examples]
    _overlap(items, _held_out_examples(config), against)
    for example in [stream.at(position) for position in range(min(show, stream.size))]:
        for side, made in zip(("chosen", "rejected"), rendered.get(example.id, ()), strict=False):
            long = ", too long" if made.length > settings.max_tokens else ""
            print(f"\n── {example.id}{f', {side}' if example.rejected else ''}{long} ──\n{marked(made, chat)}")
    _refusals(config, refused, len(examples))


def marked(made: Rendered, chat: Chat) -> str:
    """The text of the tokens with what is trained in brackets: `"…assistant\\n⟦Hello<|im_end|>⟧"`."""
    stretches = groupby(zip(made.tokens_T.tolist(), made.mask_T.tolist(), strict=True), key=lambda pair: pair[1])
    texts = ((trained, chat.spell(*(token for token, _ in pairs))) for trained, pairs in stretches)
    return "".join(f"⟦{_clipped(text)}⟧" if trained else _clipped(text) for trained, text in texts)


def _rendered(
    examples: Sequence[Example], renderer: Renderer
) -> tuple[dict[str, tuple[Rendered, ...]], dict[str, DataError]]:
    """Each example in tokens, chosen first; and those that the template refuses."""
    rendered, refused = dict[str, tuple[Rendered, ...]](), dict[str, DataError]()
    for example in examples:
        try:
            rendered[example.id] = tuple(map(renderer.render, example.conversations))
        except DataError as error:
            refused[example.id] = error
    return rendered, refused


def _tokens(config: StageConfig, rendered: dict[str, tuple[Rendered, ...]]) -> None:
    if not rendered:
        return
    paired = len(next(iter(rendered.values()))) == 2
    counts = dict[str, list[int]]()
    for index, side in enumerate((" of chosen", " of rejected") if paired else ("",)):
        made = [several[index] for several in rendered.values()]
        counts[f"prompt{side}"] = [m.prompt_length for m in made]
        counts[f"trained{side}"] = [int(m.mask_T.sum()) for m in made]
        counts[f"all{side}"] = [m.length for m in made]
    print(_percentiles(counts))
    settings = config.data
    long = sum(max(made.length for made in several) > settings.max_tokens for several in rendered.values())
    fate = {"drop": "left out", "truncate": "cut off", "refuse": "refused: the run would not start"}[settings.too_long]
    said = f", and are {fate} (data.too_long)" if long else ""
    print(f"{long} of {len(rendered)} examples are longer than data.max_tokens = {settings.max_tokens}{said}\n")


def _overlap(items: Sequence[_Item], held_out: Sequence[Passage], against: Sequence[Path]) -> None:
    texts = ["\n".join(item.texts) for item in items]
    for kind, near in (("exact", False), ("exact or near", True)):
        found = duplicates(texts, near, [item.label for item in items])
        first = next(((late, early) for late, early in found.items()), None)
        example = f", e.g. {items[first[0]].id} and {items[first[1]].id}" if first else ""
        print(f"duplicates {len(found)} {kind}{example}")
    known = {"what is held out": list(held_out)} if held_out else {}
    known |= {str(path): list(passages(local_file("--against", str(path)))) for path in against}
    if not held_out:
        print("overlap    nothing is held out")
    for name, asked in known.items():
        hits = known_from([item.texts for item in items], asked)
        example = next((f", e.g. {items[i].id} and {where}" for i, where in hits.items()), "")
        print(f"overlap    {len(hits)} with {name}{example}")


def _held_out_prompts(config: RLConfig) -> list[Passage]:
    settings = config.data
    count = _ALL if settings.path or settings.hub or settings.eval_path else config.eval.prompts
    try:
        prompts = eval_prompts(settings, config.run.seed, count)
    except DataError:
        return []
    return [Passage(prompt.id, _question(prompt), True) for prompt in prompts]


def _held_out_examples(config: StageConfig) -> list[Passage]:
    try:
        examples = held_out_examples(config.data, config.run.seed, _ALL, shape_of(config))
    except DataError:
        return []
    return [Passage(example.id, text, asked) for example in examples for text, asked in _asked(example)]


def _asked(example: Example) -> Iterator[tuple[str, bool]]:
    """Its texts, and which of them are questions."""
    users = {message.content for message in example.chosen.messages if message.role == "user"}
    for text in texts_of(example):
        yield text, text in users


def _question(prompt: Prompt) -> str:
    return str(prompt.context["question"])


def _labels(examples: Sequence[Example]) -> str:
    labels = Counter(example.label for example in examples)
    return f", {labels[True]} of them good and {labels[False]} bad" if None not in labels else ""


def _chat(config: Root) -> Chat:
    return Chat(*load_tokenizer(config.model))


def _percentiles(counts: dict[str, list[int]]) -> str:
    rows = [["", *_PERCENTILES, "sum"]]
    for name, values in counts.items():
        found = np.percentile(values, list(_PERCENTILES.values()), method="higher")
        rows.append([name, *(f"{value:.0f}" for value in found), f"{sum(values)}"])
    return table(rows)


def _clipped(text: str) -> str:
    if len(text) <= _SHOWN:
        return text
    return f"{text[: _SHOWN // 2]}\n… {len(text) - _SHOWN} characters …\n{text[-_SHOWN // 2 :]}"


def _note(skipped: str) -> None:
    for line in filter(None, skipped.splitlines()):
        print(f"           {line}")


def _refusals(config: StageConfig, refused: dict[str, DataError], total: int) -> None:
    """What training would say, and with its exit status."""
    if not refused:
        return
    name, error = next(iter(refused.items()))
    said = f"{len(refused)} of {total} examples cannot be rendered; the first: {name}: {error}"
    if not config.data.skip_bad_rows:
        raise DataError(f"{said}\ndata.skip_bad_rows=true leaves them out")
    print(f"\n{said}\nthey are left out (data.skip_bad_rows)")
