"""How tests and candidate talk, two processes that share no memory: values travel as plain data.

A message is a flat graph, `[refs, nodes]`: a ref is a scalar or `[i]`, the node i, so cycles, shared parts and depth
cost nothing. What is not data stays at home and travels as a handle. The checker decodes only types it names here and
builds them itself, so no `__eq__`, `__hash__` or `__bool__` of the candidate's ever runs where verdicts are made.

The bytes are JSON, through the C parts of the json module alone: importing it whole would cost 10 ms per check.
"""

from __future__ import annotations

import builtins
import os
from _json import encode_basestring_ascii, make_encoder, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Node = list[Any]

_SCALARS = {type(None), bool, int, float, str}
_BASES = (str, int, float, list, tuple, dict, set, frozenset, bytes)
_DICTS = {"collections.Counter", "collections.OrderedDict", "collections.defaultdict"}
_STANDARD: dict[str, Callable[[Any], list[Any]]] = {
    "decimal.Decimal": lambda v: [str(v)],
    "fractions.Fraction": lambda v: [v.numerator, v.denominator],
    "datetime.date": lambda v: [v.year, v.month, v.day],
    "datetime.time": lambda v: [v.hour, v.minute, v.second, v.microsecond],
    "datetime.datetime": lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond],
    "datetime.timedelta": lambda v: [v.days, v.seconds, v.microseconds],
}
_CONSTANTS = {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}
_MUTABLE = {"list", "set", "dict", "bytearray", "deque", "own"}
_MAX_MESSAGE = 2**26  # bytes


class NotData(Exception):
    """A value of the tests that cannot be handed to the candidate: the tests are at fault, not the response."""


class Port:
    """One end of the line: encodes and decodes values, and knows which of its objects the other end may name.

    Subclasses say what becomes of objects that are not data (`offer`), and what a handle of the other end turns into
    (`adopt`).
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.exports: dict[int, Any] = {}
        self.classes: dict[str, type] = {}  # classes that both ends have: their instances travel by value

    def offer(self, value: Any) -> Node:
        raise NotImplementedError

    def adopt(self, node: Node) -> Any:
        raise NotImplementedError

    def home(self, value: Any) -> int | None:
        """The handle of an object that belongs to the other end."""
        raise NotImplementedError

    def export(self, value: Any) -> int:
        self.exports[id(value)] = value
        return id(value)

    def send(self, message: Any) -> None:
        data = "".join(_ENCODE(message, 0)).encode()
        write_frame(self.fd, data)

    def receive(self) -> Any:
        return _SCAN(read_frame(self.fd).decode(), 0)[0]

    def encode(self, values: Iterable[Any]) -> tuple[list[Any], list[Node], list[Any]]:
        """The refs of `values`, the nodes they point to, and those of the node objects that can change."""
        nodes: list[Node] = []
        queue: list[Any] = []
        seen: dict[int, int] = {}

        def ref(value: Any) -> Any:
            if type(value) in _SCALARS:
                return value
            if id(value) not in seen:
                seen[id(value)] = len(queue)
                queue.append(value)
            return [seen[id(value)]]

        refs = [ref(value) for value in values]
        for value in queue:  # grows on the way
            nodes.append(self._node(value, ref))
        return refs, nodes, [v for v, node in zip(queue, nodes, strict=True) if _is_mutable(node)]

    def decode(self, refs: list[Any], nodes: list[Node], old: dict[int, Any]) -> tuple[list[Any], list[Any]]:
        """The values of `refs`, and all that can change; `old` are objects that take the content of their node."""
        made: dict[int, Any] = {}

        def get(ref: Any) -> Any:
            if type(ref) is not list:
                return ref
            if ref[0] not in made:
                made[ref[0]] = self._immutable(nodes[ref[0]], get)
            return made[ref[0]]

        changeable = [i for i, node in enumerate(nodes) if node[0] in _MUTABLE]
        for i in changeable:
            made[i] = old[i] if i in old else self._empty(nodes[i])
        for own in (True, False):  # instances first: they may be keys, and their hash may need their content
            for i in changeable:
                if (nodes[i][0] == "own") == own:
                    _fill(made[i], nodes[i], get)
        return [get(ref) for ref in refs], [made[i] for i in changeable if _is_mutable(nodes[i])]

    def _node(self, value: Any, ref: Callable[[Any], Any]) -> Node:
        kind: Any = type(value)
        handle = self.home(value)
        if handle is not None:
            return ["home", handle]
        if kind in _BASES or kind is bytearray:
            return _content(kind, value, ref)
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is range:
            return ["range", value.start, value.stop, value.step]
        if kind is type({}.keys()):
            return ["keys", [ref(key) for key in value]]
        if value is Ellipsis or value is NotImplemented:
            return ["constant", repr(value)]
        known = vars(builtins).get(getattr(value, "__name__", "")) if isinstance(value, type) else None
        if known is not None and known is value:
            return ["type", known.__name__]
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind in self.classes.values() and hasattr(value, "__dict__"):
            return ["own", kind.__qualname__, [ref(k) for k in vars(value)], [ref(v) for v in vars(value).values()]]
        if name in _DICTS:
            return ["dict", [ref(key) for key in value], [ref(v) for v in value.values()], None, name]
        if name == "collections.deque":
            return ["deque", [ref(item) for item in value], value.maxlen]
        if name in _STANDARD and getattr(value, "tzinfo", None) is None:
            return ["standard", name, _STANDARD[name](value)]
        if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
            return ["numpy", ref(value.tolist()), str(value.dtype), list(getattr(value, "shape", []))]
        for base in _BASES:
            if isinstance(value, base):
                return [*_content(base, value, ref), self.offer(value)]
        return self.offer(value)

    def _empty(self, node: Node) -> Any:
        if node[0] == "own":
            return object.__new__(self.classes[node[1]])
        if node[0] == "deque":
            from collections import deque

            return deque(maxlen=node[2])
        if node[0] == "dict" and len(node) == 5:
            import collections

            assert node[4] in _DICTS
            return getattr(collections, node[4].partition(".")[2])()
        kind: Any = {"list": list, "set": set, "dict": dict, "bytearray": bytearray}[node[0]]
        return self._dress(kind, node)()

    def _immutable(self, node: Node, get: Callable[[Any], Any]) -> Any:
        match node[0]:
            case "tuple" | "frozenset" | "str" | "int" | "float" | "bytes" as name:
                content = node[1].encode("latin-1") if name == "bytes" else node[1]
                if name in ("tuple", "frozenset"):
                    content = [get(ref) for ref in content]
                return self._dress(getattr(builtins, name), node)(content)
            case "complex":
                return complex(node[1], node[2])
            case "range":
                return range(node[1], node[2], node[3])
            case "keys":
                return dict.fromkeys(get(ref) for ref in node[1]).keys()
            case "constant":
                return _CONSTANTS[node[1]]
            case "type":
                found = getattr(builtins, node[1])
                assert isinstance(found, type)
                return found
            case "standard":
                assert node[1] in _STANDARD
                module, _, name = node[1].partition(".")
                return getattr(__import__(module), name)(*node[2])
            case "numpy":
                return _numpy(get(node[1]), node[2], node[3])
            case "home":
                return self.exports[node[1]]
            case _:
                return self.adopt(node)

    def _dress(self, kind: type, node: Node) -> type:
        """A subclass of `kind` that looks other attributes up at the other end, where the node names an object."""
        place = 3 if node[0] == "dict" else 2
        if len(node) <= place or node[place] is None:
            return kind
        remote = self.adopt(node[place])
        return type(kind.__name__, (kind,), {"__getattr__": lambda _, name: getattr(remote, name)})


def _is_mutable(node: Node) -> bool:
    return node[0] in _MUTABLE and not (type(node[-1]) is list and node[-1][:1] == ["ref"])


def _content(kind: type, value: Any, ref: Callable[[Any], Any]) -> Node:
    """The node of an instance of `kind` or of a subclass, which is read as its base reads it."""
    if kind is dict:
        return ["dict", [ref(key) for key in dict.keys(value)], [ref(v) for v in dict.values(value)]]
    if kind in (str, int, float):
        plain = {str: str.__str__, int: int.__int__, float: float.__float__}[kind](value)
        return [kind.__name__, plain]
    if kind in (bytes, bytearray):
        return [kind.__name__, bytes(value).decode("latin-1")]
    items = list(kind.__iter__(value))  # type: ignore[attr-defined]
    if set(map(type, items)) <= _SCALARS:
        return [kind.__name__, items]
    return [kind.__name__, [ref(item) for item in items]]


def _fill(made: Any, node: Node, get: Callable[[Any], Any]) -> None:
    match node[0]:
        case "list":
            made[:] = [get(ref) for ref in node[1]]
        case "set":
            made.clear()
            made.update(get(ref) for ref in node[1])
        case "dict":
            made.clear()
            dict.update(made, [(get(key), get(value)) for key, value in zip(node[1], node[2], strict=True)])
        case "bytearray":
            made[:] = node[1].encode("latin-1")
        case "deque":
            made.clear()
            made.extend(get(ref) for ref in node[1])
        case "own":
            vars(made).clear()
            vars(made).update((get(key), get(value)) for key, value in zip(node[2], node[3], strict=True))


def _numpy(content: Any, dtype: str, shape: list[int]) -> Any:
    """An array as an array where numpy is there; a scalar of numpy as the plain number it holds."""
    if not shape:
        return content
    try:
        import numpy
    except ImportError:
        return content
    return numpy.array(content, dtype=object if dtype == "object" else dtype).reshape(shape)


def read_frame(fd: int) -> bytes:
    """The next frame; `EOFError` where the other end has closed the line."""
    size = int.from_bytes(_read(fd, 8), "little")
    if size > _MAX_MESSAGE:
        raise EOFError
    return _read(fd, size)


def write_frame(fd: int, data: bytes) -> None:
    view = memoryview(len(data).to_bytes(8, "little") + data)
    while view:
        view = view[os.write(fd, view) :]


def _read(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class _ScannerOptions:
    strict = False
    object_hook = object_pairs_hook = array_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float  # NaN, Infinity, -Infinity
    memo: dict[str, str] = {}  # noqa: RUF012 - the scanner's own


def _refuse(value: Any) -> Any:
    raise TypeError(f"not JSON: {type(value).__name__}")


_SCAN: Any = make_scanner(_ScannerOptions())  # type: ignore[arg-type]
_ENCODE = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)
