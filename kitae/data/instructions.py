"""Requests with verifiable instructions, in the manner of IFEval: "Write about tea. Do not use any commas."

One request asks for one to five things that do not contradict each other: of each family (case, length, ending, …) at
most one is drawn. The reference is what the verifier `instructions` reads, as JSON text.
"""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

# fmt: off
TOPICS = (
    "autumn", "bees", "bicycles", "bread", "bridges", "chess", "clouds", "coffee", "comets", "deserts", "dolphins",
    "earthquakes", "elephants", "forests", "friendship", "gardens", "glaciers", "grandparents", "guitars", "harbours",
    "honey", "islands", "kites", "languages", "libraries", "lighthouses", "maps", "markets", "moonlight", "mountains",
    "museums", "music", "ocean waves", "old cities", "owls", "paintings", "patience", "penguins", "photography",
    "rain", "rivers", "robots", "running", "sailing", "salt", "school", "silence", "sleep", "snow", "space travel",
    "spiders", "stars", "storms", "summer", "swimming", "tea", "theatre", "trains", "travel", "trees", "volcanoes",
    "whales", "windmills", "winter", "wolves", "writing letters",
)
FORMS = ("a short text", "a poem", "a story", "a letter", "an advertisement", "a blog post", "a diary entry", "advice")
WORDS = (
    "always", "bright", "careful", "change", "early", "family", "gentle", "green", "heart", "hope", "light", "memory",
    "morning", "nature", "often", "quiet", "simple", "slow", "strong", "summer", "time", "together", "water", "world",
)
ENDINGS = ("That is all.", "Thank you for reading.", "Until next time.", "The end.", "Ask me for more.")
# fmt: on

Made = tuple[str, dict[str, Any], str]
"""An instruction's id, its arguments, and the sentence that asks for it."""


def _plain(id: str, asked: str) -> Callable[[random.Random], Made]:
    return lambda rng: (id, {}, asked)


def _words(rng: random.Random) -> Made:
    relation, number = rng.choice(("at least", "less than")), rng.randrange(20, 121, 10)
    return "length_constraints:number_words", _bound(relation, num_words=number), f"Use {relation} {number} words."


def _sentences(rng: random.Random) -> Made:
    relation, number = rng.choice(("at least", "less than")), rng.randint(3, 8)
    arguments = _bound(relation, num_sentences=number)
    return "length_constraints:number_sentences", arguments, f"Use {relation} {number} sentences."


def _bullets(rng: random.Random) -> Made:
    number = rng.randint(2, 5)
    asked = f"Your answer must contain exactly {number} bullet points, in Markdown, each like this: * a point"
    return "detectable_format:number_bullet_lists", {"num_bullets": number}, asked


def _sections(rng: random.Random) -> Made:
    number = rng.randint(2, 4)
    arguments = {"section_spliter": "SECTION", "num_sections": number}
    asked = f"Write at least {number} sections, and begin each with SECTION and its number, like SECTION 1."
    return "detectable_format:multiple_sections", arguments, asked


def _highlights(rng: random.Random) -> Made:
    number = rng.randint(1, 3)
    asked = f"Highlight at least {number} part{'s' * (number > 1)} in Markdown, like *this part*."
    return "detectable_format:number_highlighted_sections", {"num_highlights": number}, asked


def _placeholders(rng: random.Random) -> Made:
    number = rng.randint(1, 3)
    asked = f"Use at least {number} placeholder{'s' * (number > 1)} in square brackets, such as [name]."
    return "detectable_content:number_placeholders", {"num_placeholders": number}, asked


def _keywords(rng: random.Random) -> Made:
    words = rng.sample(WORDS, rng.randint(1, 3))
    return "keywords:existence", {"keywords": words}, f"Include the words {', '.join(words)}."


def _frequency(rng: random.Random) -> Made:
    word, number = rng.choice(WORDS), rng.randint(2, 3)
    arguments = {"keyword": word, "frequency": number, "relation": "at least"}
    return "keywords:frequency", arguments, f"Use the word {word} at least {number} times."


def _forbidden(rng: random.Random) -> Made:
    words = rng.sample(("the", "is", "and", "very", "I", "you", "it", "of"), 2)
    return "keywords:forbidden_words", {"forbidden_words": words}, f"Do not use the words {' and '.join(words)}."


def _letter(rng: random.Random) -> Made:
    letter, number = rng.choice("bcdfghkmpvwyz"), rng.randint(3, 8)
    arguments = {"letter": letter, "let_frequency": number, "let_relation": "at least"}
    return "keywords:letter_frequency", arguments, f"Use the letter {letter} at least {number} times."


def _ending(rng: random.Random) -> Made:
    phrase = rng.choice(ENDINGS)
    asked = f"End with exactly these words: {phrase} Nothing may follow them."
    return "startend:end_checker", {"end_phrase": phrase}, asked


def _postscript(rng: random.Random) -> Made:
    marker = rng.choice(("P.S.", "P.P.S"))
    asked = f"Add a postscript at the end that starts with {marker}"
    return "detectable_content:postscript", {"postscript_marker": marker}, asked


FAMILIES: tuple[tuple[Callable[[random.Random], Made], ...], ...] = (
    (
        _plain("change_case:english_lowercase", "Write in English and in lowercase letters only."),
        _plain("change_case:english_capital", "Write in English and in capital letters only."),
    ),
    (_words, _sentences),
    (_plain("punctuation:no_comma", "Do not use any commas."),),
    (_bullets, _sections),
    (_highlights, _plain("detectable_format:title", "Give it a title in double angular brackets, like <<my title>>.")),
    (_placeholders,),
    (_keywords, _frequency),
    (_forbidden,),
    (_letter,),
    (_ending, _postscript, _plain("startend:quotation", "Put the whole answer in double quotation marks.")),
)
_CASE, _ENDS = FAMILIES[0], FAMILIES[-1]


def draw_instructions(rng: random.Random, params: Mapping[str, Any]) -> tuple[str, str]:
    """A request and its reference; `params["constraints"]` is the largest number of instructions."""
    families = rng.sample(FAMILIES, rng.randint(1, params["constraints"]))
    if _CASE in families:  # words that must appear as they are contradict it
        families = [family for family in families if family is _CASE or not _spells(family)]
    made = [rng.choice(family)(rng) for family in families]
    request = f"Write {rng.choice(FORMS)} about {rng.choice(TOPICS)}."
    reference = {"instructions": [{"id": id, "kwargs": arguments} for id, arguments, _ in made]}
    return " ".join([request, *(asked for _, _, asked in made)]), json.dumps(reference)


def _spells(family: tuple[Callable[[random.Random], Made], ...]) -> bool:
    return family is _ENDS or _sections in family


def _bound(relation: str, **number: int) -> dict[str, Any]:
    return {"relation": relation, **number}
