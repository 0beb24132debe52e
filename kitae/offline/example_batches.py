"""Examples in tokens: which ones a step trains on, which are held out, and which do not fit.

KTO puts an answer after a prompt that it was not given to: the partner of each answer follows from the order alone.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

from kitae.config.root import StageConfig
from kitae.data.chat import Chat
from kitae.data.data_files import fingerprint
from kitae.data.examples import Example, ExampleStream, held_out_examples, open_examples
from kitae.data.rendering import Renderer, fit_list, fit_stream
from kitae.errors import DataError
from kitae.models.load import load_tokenizer
from kitae.offline.base import Item
from kitae.offline.methods import check_examples, shape_of


class ExampleBatches:
    """The data of a run. Opening it reads and renders every example, so that whatever is wrong with one of them is said
    before a model is loaded. notes: what there is to say about those that were left out. fingerprint: of what is left,
    so that a run that goes on can tell whether it still is what it began with."""

    def __init__(self, config: StageConfig) -> None:
        shape, seed = shape_of(config), config.run.seed
        stream = opened(config)
        tokenizer, generation = load_tokenizer(config.model)
        self._renderer = Renderer(Chat(tokenizer, generation), config.data.train_on, config.data.max_tokens)
        self._batch = config.training.batch
        self._stream = fit_stream(stream, self._renderer, config.data)
        self._partners = _partners(self._stream, self._batch) if shape == "labelled" else {}
        self.notes = [self._stream.skipped] if self._stream.skipped else []
        held_out = held_out_examples(config.data, seed, config.eval.examples, shape)
        fitting = fit_list(held_out, self._renderer, config.data)
        self.held_out = [self._item(e) for e in fitting]
        self.fingerprint = fingerprint((*chain.from_iterable(self._stream.sources), *fitting))

    @property
    def size(self) -> int:
        return self._stream.size

    def steps(self, epochs: float) -> int:
        """As many as these passes over the examples take."""
        return max(1, math.ceil(epochs * self.size / self._batch - 1e-9))

    def epoch(self, step: int) -> float:
        return step * self._batch / self.size

    def batch(self, step: int) -> list[Item]:
        """Depends on the step alone; steps count from 1."""
        return [self._item(self._stream.at(p)) for p in range((step - 1) * self._batch, step * self._batch)]

    def trained(self, steps: int) -> Iterator[Item]:
        """All that so many steps train on, each once."""
        seen: set[str] = set()
        for position in range(steps * self._batch):
            example = self._stream.at(position)
            if example.id not in seen:
                seen.add(example.id)
                yield self._item(example)

    def _item(self, example: Example) -> Item:
        sequences = tuple(map(self._renderer.render, example.conversations))
        partner = self._partners.get(example.id)
        strange = None if partner is None else self._renderer.render(partner.chosen)
        return Item(example.id, sequences, example.label, example.margin, strange)


def opened(config: StageConfig) -> ExampleStream:
    """The examples to train on, in the shape that the run needs, with all that it needs of them."""
    stream = open_examples(config.data, config.run.seed, shape_of(config))
    check_examples(config, chain.from_iterable(stream.sources))
    if shape_of(config) == "labelled":
        _partners(stream, config.training.batch)
    return stream


def _partners(stream: ExampleStream, block: int) -> dict[str, Example]:
    """For each answer, by its id, one to another prompt. It depends on the order of the data alone, not on how many
    steps are trained; as far as may be, both are in one batch of the first epoch."""
    order = stream.order()
    found = partners_of([_prompt(example) for example in order], block)
    if not found:
        raise DataError(f"kto needs answers to at least two prompts, got one: that of {order[0].id}")
    return {example.id: order[number] for example, number in zip(order, found, strict=True)}


def _prompt(example: Example) -> str:
    return repr(example.chosen.messages[: example.chosen.prompt])


def partners_of(prompts: Sequence[Hashable], block: int) -> list[int]:
    """Of each place, another with another prompt: `partners_of("aabb", block=4)` is `[3, 3, 1, 1]`.

    It is the nearest one before it in its block of so many places, in a circle; else the nearest before it of all, in a
    circle too. Where all prompts are the same, there is none: the list is empty.
    """
    if len(set(prompts)) < 2:
        return []
    far = _nearest_others(prompts)
    return [_near(prompts, number, block, far[number]) for number in range(len(prompts))]


def _near(prompts: Sequence[Hashable], number: int, block: int, far: int) -> int:
    start = number - number % block
    size = min(block, len(prompts) - start)
    circle = (start + (number - start - distance) % size for distance in range(1, size))
    return next(other for other in chain(circle, [far]) if prompts[other] != prompts[number])


def _nearest_others(prompts: Sequence[Hashable]) -> list[int]:
    """Of each place, the nearest before it with another prompt; the list is a circle."""
    found = [0] * len(prompts)
    for _ in range(2):  # the second time round, what comes before the first place is known
        for number in range(len(prompts)):
            before = number - 1 if number else len(prompts) - 1
            found[number] = before if prompts[before] != prompts[number] else found[before]
    return found
