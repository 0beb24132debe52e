"""Units of measurement and of money: `unit_of("cm^2")` → `Unit("length", Fraction(1, 10_000), 2)`.

Only units that are converted are listed. Whatever else stands after a number ("apples", "units") is a unit that nothing
is known of, and counts for nothing.
"""

from fractions import Fraction
from typing import NamedTuple

from kitae.verifiers.math.tree import Node

_SIZES = {
    "length": "mm:1/1000 millimeter:1/1000 millimetre:1/1000 cm:1/100 centimeter:1/100 centimetre:1/100 dm:1/10 m:1 "
    "meter:1 metre:1 km:1000 kilometer:1000 kilometre:1000 in:127/5000 inch:127/5000 inche:127/5000 ft:381/1250 "
    "foot:381/1250 feet:381/1250 yd:1143/1250 yard:1143/1250 mi:201168/125 mile:201168/125",
    "mass": "mg:1/1000 g:1 gram:1 kg:1000 kilogram:1000 lb:45359237/100000 pound:45359237/100000 oz:45359237/1600000 "
    "ounce:45359237/1600000",
    "time": "s:1 sec:1 second:1 min:60 minute:60 h:3600 hr:3600 hour:3600 day:86400 week:604800",
    "volume": "ml:1/1000 mL:1/1000 milliliter:1/1000 l:1 L:1 liter:1 litre:1",
    "gallon": "gallon:1 gal:1",
    "money": "$:1 dollar:1 usd:1 USD:1 buck:1 cent:1/100 ¢:1/100",
    "euro": "€:1 euro:1 eur:1 EUR:1",
    "pound": "£:1 gbp:1 GBP:1",
    "mph": "mph:1",
}


def _table() -> dict[str, tuple[str, Fraction]]:
    """Name → dimension and size, with the plurals: `"meters"` → `("length", Fraction(1))`."""
    units: dict[str, tuple[str, Fraction]] = {}
    for dimension, sizes in _SIZES.items():
        for entry in sizes.split():
            name, _, size = entry.rpartition(":")
            units[name] = (dimension, Fraction(size))
            if len(name) > 1 and not name.endswith("s"):
                units[f"{name}s"] = units[name]
    return units


UNITS = _table()
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3}
_EXPONENTS = {"": 1, "2": 2, "3": 3, "4": 4, "-1": -1, "-2": -2}
DEGREE = Node("div", (Node("constant", value="pi"), Node("number", value=Fraction(180))))


class Unit(NamedTuple):
    """What a unit measures, and its size with the power in it: `Unit("length", Fraction(1, 10_000), 2)` for cm²."""

    dimension: str
    size: Fraction
    power: int


def unit_of(text: str) -> Unit | None:
    """The unit that "cm", "cm^2", "square feet" or "sq. ft" stands for."""
    name, _, exponent = text.strip().rstrip(".").partition("^")
    words, power = name.split(), _EXPONENTS.get(exponent.strip())
    if power == 1 and len(words) > 1:
        power = _POWERS.get(words[0].lower(), 1)
        words = words[power > 1 :]
    found = UNITS.get(words[0]) or UNITS.get(words[0].lower()) if len(words) == 1 else None
    return None if found is None or power is None else Unit(found[0], found[1] ** power, power)


def scaled(node: Node, size: Fraction) -> Node:
    if size == 1:
        return node
    if node.kind == "number":
        return Node("number", node.args and (_shifted(node.args[0], size),), node.value * size)
    return Node("mul", (node, Node("number", value=size)))


def _shifted(literal: Node, size: Fraction) -> Node:
    precise, places = literal.value
    return Node("literal", value=(precise if size == Fraction(1, 100) else 0, places + 2))
