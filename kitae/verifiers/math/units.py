"""The words after a number: `measure_of("cm^2")` → `Measure((("length", 2),), Fraction(1, 10_000), frozenset())`.

Known units are converted. Other words ("apples", "units north") are compared as words, without plurals; "units" and
small words carry no meaning and are left out. Magnitudes ("million", "dozen") are factors, not units.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from kitae.verifiers.math.tree import Node

_SIZES = {
    "length": "meter:1 metre:1 in:127/5000 inch:127/5000 ft:381/1250 foot:381/1250 feet:381/1250 "
    "yd:1143/1250 yard:1143/1250 mi:201168/125 mile:201168/125 "
    "millimeter:1/1000 millimetre:1/1000 centimeter:1/100 centimetre:1/100 kilometer:1000 kilometre:1000",
    "mass": "gram:1 kilogram:1000 milligram:1/1000 lb:45359237/100000 pound:45359237/100000 oz:45359237/1600000 "
    "ounce:45359237/1600000",
    "time": "sec:1 second:1 min:60 minute:60 h:3600 hr:3600 hour:3600 day:86400 week:604800",
    "months": "month:1 year:12 yr:12",
    "volume": "ml:1/1000 milliliter:1/1000 millilitre:1/1000 l:1 liter:1 litre:1",
    "gallon": "gallon:1 gal:1",
    "dollar": "$:1 dollar:1 usd:1 USD:1 buck:1 cent:1/100 ¢:1/100",
    "euro": "€:1 euro:1 eur:1 EUR:1",
    "sterling": "£:1 gbp:1 GBP:1",
    "yen": "¥:1 yen:1",
    "rupee": "₹:1 rupee:1",
    "celsius": "celsius:1 Celsius:1",
    "fahrenheit": "fahrenheit:1 Fahrenheit:1",
    "angle": "radian:1 rad:1",
}
_METRIC = {  # symbol → dimension, and the prefixes that are used with it
    "m": ("length", "kdcmnµμ"), "g": ("mass", "km"), "s": ("time", "mn"), "L": ("volume", "m"), "J": ("energy", "kM"),
    "W": ("power", "kM"), "N": ("force", "k"), "Hz": ("frequency", "kMG"), "Pa": ("pressure", "kM"),
    "mol": ("amount", "m"), "V": ("voltage", "k"), "A": ("current", "m"), "eV": ("electronvolt", "kM"),
}  # fmt: skip
_PREFIXES = {
    "k": "1000", "M": "1000000", "G": "1000000000", "d": "1/10", "c": "1/100", "m": "1/1000", "n": "1/1000000000",
    "µ": "1/1000000", "μ": "1/1000000",
}  # fmt: skip
_CURRENCIES = ("dollar", "euro", "sterling", "yen", "rupee")
MAGNITUDES = {
    "hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip


def _table() -> dict[str, tuple[str, Fraction]]:
    """Names to dimension and size, with plurals: `"meters"` → `("length", Fraction(1))`."""
    units: dict[str, tuple[str, Fraction]] = {}
    for dimension, sizes in _SIZES.items():
        for entry in sizes.split():
            name, _, size = entry.rpartition(":")
            units[name] = (dimension, Fraction(size))
            if len(name) > 1:
                units[f"{name}es" if name.endswith("ch") else f"{name}s"] = units[name]
    for symbol, (dimension, prefixes) in _METRIC.items():
        units[symbol] = (dimension, Fraction(1))
        units |= {prefix + symbol: (dimension, Fraction(_PREFIXES[prefix])) for prefix in prefixes}
    return units


UNITS = _table()
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_RAISED = {"squared": 2, "cubed": 3}
_SILENT = {
    "unit", "of",
    "them", "and", "the", "in", "each", "total", "only", "exactly", "about", "approximately", "long", "is",
    "all",
}  # fmt: skip
_ALTERING = {  # words that change the number before them, or the answer
    "not", "no", "wrong", "incorrect", "false", "isn", "never", "except", "nor", "t", "or", "maybe", "perhaps",
    "squared", "cubed", "factorial", "half", "halve", "third", "tenth", "hundredth", "thousandth", "plus", "minus",
    "over", "negative", "root", "remainder", "to", "through",
}  # fmt: skip
_PEOPLE = {"person": "people", "child": "children", "man": "men", "woman": "women"}
_HALF_DAY_RE = re.compile(r"\b([ap])\.?\s?m\b\.?", re.IGNORECASE)
_PIECE_RE = re.compile(r"[^\W\d_]+|\^\s*\{?\s*-?[0-9]+\s*\}?|[0-9]+|[/$€£¥₹¢]")
DEGREE = Node("div", (Node("constant", value="pi"), Node("number", value=Fraction(180))))


class Measure(NamedTuple):
    """Dimensions with their powers, the size in base units, and the other words: "kg of apples" → mass, 1000, apple."""

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction
    words: frozenset[str]

    @property
    def altering(self) -> bool:
        """Whether the words change the number, as in "5 is wrong" or "5 or 6", so that they cannot be left out."""
        digits = any(word[0].isdigit() for word in self.words) and self.modulus is None
        return digits or bool(self.words & _ALTERING)

    @property
    def modulus(self) -> str | None:
        """The 7 of 3 (mod 7)."""
        return next((word for word in self.words if word.isdigit()), None) if "mod" in self.words else None

    @property
    def currency(self) -> str | None:
        return next((name for name, _ in self.dimensions if name in _CURRENCIES), None)


@lru_cache(maxsize=512)
def measure_of(text: str) -> Measure:
    """The meaning of "cm", "cm^2", "square feet", "m/s ^2", "miles per hour" or "apples"."""
    text = re.sub(r"\bmph\b", "mi/h", re.sub(r"\bkph\b", "km/h", _HALF_DAY_RE.sub(r" half\1 ", text)))
    powers: dict[str, int] = {}
    size, words = Fraction(1), set[str]()
    sign, power, last = 1, 1, ""
    for piece in _PIECE_RE.findall(text):
        found = UNITS.get(piece) or UNITS.get(piece.lower())
        if piece[0] == "^":
            extra = int(piece.strip("^{} ")) - 1
            if last:
                size *= UNITS[last][1] ** (sign * extra)
                powers[UNITS[last][0]] += sign * extra
        elif piece.lower() in _RAISED and last:  # meters per second squared
            extra = _RAISED[piece.lower()] - 1
            size *= UNITS[last][1] ** (sign * extra)
            powers[UNITS[last][0]] += sign * extra
        elif piece == "/" or piece in ("per", "Per", "a", "an"):
            sign = -1
        elif piece.lower() in _POWERS:
            power = _POWERS[piece.lower()]
        elif found and not (piece == "in" and powers):
            last = piece if piece in UNITS else piece.lower()
            size *= found[1] ** (sign * power)
            powers[found[0]] = powers.get(found[0], 0) + sign * power
            power = 1
        elif (word := _singular(piece.lower())) not in _SILENT:
            words.add(word)
            power = 1
    known = tuple(sorted((name, power) for name, power in powers.items() if power))
    return Measure(known, size, frozenset(words))


def _singular(word: str) -> str:
    if word in _PEOPLE:
        return _PEOPLE[word]
    if word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith("es") and word[:-2].endswith(("s", "x", "ch", "sh")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def is_known_unit(text: str) -> bool:
    """Whether the whole text is a unit of measurement: `"km/h"` → True."""
    measure = measure_of(text)
    return bool(measure.dimensions) and not measure.words


def scaled(node: Node, size: Fraction) -> Node:
    if size == 1:
        return node
    if node.kind == "number":
        return Node("number", node.args and (_shifted(node.args[0], size),), node.value * size)
    return Node("mul", (node, Node("number", value=size)))


def _shifted(literal: Node, size: Fraction) -> Node:
    precise, places = literal.value
    return Node("literal", value=(precise if size == Fraction(1, 100) else 0, places + 2))


def joined(larger: Node, smaller: Node) -> Node | None:
    """3 feet and 4 inches → 40 inches; None if the units cannot be added."""
    first, second = measure_of(larger.value), measure_of(smaller.value)
    if not first.dimensions or first.dimensions != second.dimensions or first.words or second.words:
        return None
    value = Node("add", (scaled(larger.args[0], first.size / second.size), smaller.args[0]))
    return Node("unit", (value,), smaller.value)
