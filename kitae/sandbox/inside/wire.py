"""The protocol between tests and candidate, two processes that share no memory: values are sent as plain data.

A message is a flat graph, `[refs, nodes]`: a ref is a scalar or `[i]`, the node i, so cycles, shared parts and depth
cost nothing. What is not data stays in its process and is sent as a handle. The kinds of nodes are a closed set, and
each end builds what it receives from types of its own: no `__eq__`, `__hash__` or `__bool__` of the candidate's, and
nothing of a library that it names, ever runs where verdicts are made.

The bytes are JSON, through the C parts of the json module alone: importing it whole would cost 10 ms per check.
"""

from __future__ import annotations

import os
import sys
from _json import encode_basestring_ascii, make_encoder, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Node = list[Any]

_SCALARS = {type(None), bool, int, float, str}
_BASES = (str, int, float, list, tuple, dict, set, frozenset, bytes)
_CHANGEABLE_BASES = (list, dict, set, bytearray)
_TYPES: dict[str, Any] = {
    t.__name__: t for t in (*_BASES, bool, complex, bytearray, range, object, type(None), memoryview, slice)
}
_DICTS = ("Counter", "OrderedDict", "defaultdict")
_CONSTANTS = {"Ellipsis": Ellipsis, "NotImplemented": NotImplemented}
_CHANGEABLE = {"list", "set", "dict", "bytearray", "deque", "own"}
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
_MAX_MESSAGE = 2**26  # bytes


class NotData(Exception):
    """A value of the tests that cannot be sent to the candidate: the tests are at fault, not the response."""


class Broken(Exception):
    """A malformed message: an unknown kind of node, or one with the wrong parts."""


class Port:
    """One end of the connection. It encodes and decodes values, and knows which of its objects the other end may name.

    Subclasses decide how objects that are not data are sent (`offer`), and what represents a handle of the other end
    (`adopt`; `inert` if it is part of an object whose methods belong to this end).
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.exports: dict[int, Any] = {}

    def class_of(self, name: str) -> Any:
        """A class that both ends have, so that its instances are sent by value."""
        raise NotImplementedError

    def name_of(self, kind: type) -> str | None:
        """The name of such a class; None for a class that only this end has."""
        raise NotImplementedError

    def offer(self, value: Any) -> Node:
        raise NotImplementedError

    def adopt(self, node: Node) -> Any:
        raise NotImplementedError

    def inert(self, node: Node) -> Any:
        return self.adopt(node)

    def resolve(self, node: Node) -> Any:
        """The object for a node that only one end may send."""
        raise Broken(f"a node of kind {node[0]!r}")

    def home(self, value: Any) -> int | None:
        """The handle of an object that belongs to the other end."""
        raise NotImplementedError

    def array(self, value: Any) -> Any:
        """A numpy array that was received."""
        return value

    def export(self, value: Any) -> int:
        self.exports[id(value)] = value
        return id(value)

    def send(self, message: Any) -> None:
        write_frame(self.fd, pack(message))

    def receive(self) -> Any:
        return unpack(read_frame(self.fd))

    def encode(self, values: Iterable[Any], lent: Iterable[Any] = ()) -> tuple[list[Any], list[Node], list[Any]]:
        """The refs of `values`, the nodes they point to, and the mutable objects among the nodes.

        lent: objects whose originals the other end has; they are named by their position, not sent.
        """
        nodes: list[Node] = []
        queue: list[Any] = []
        seen: dict[int, int] = {}
        places = {id(value): place for place, value in enumerate(lent)}

        def ref(value: Any) -> Any:
            if type(value) in _SCALARS:
                return value
            if id(value) not in seen:
                seen[id(value)] = len(queue)
                queue.append(value)
            return [seen[id(value)]]

        refs = [ref(value) for value in values]
        for value in queue:  # grows on the way
            nodes.append(["lent", places[id(value)]] if id(value) in places else self._node(value, ref))
        return refs, nodes, [v for v, node in zip(queue, nodes, strict=True) if node[0] in _CHANGEABLE]

    def decode(
        self, refs: list[Any], nodes: list[Node], old: dict[int, Any] | None = None, lent: list[Any] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """The values of `refs`, and all mutable objects. old: objects that take the content of their node."""
        made: dict[int, Any] = {}
        parts = _parts_of_ours(nodes)

        def get(ref: Any) -> Any:
            if type(ref) is not list:
                return ref
            (i,) = ref
            if i not in made:
                if type(i) is not int or i < 0:
                    raise Broken(f"a ref to {i!r}")
                if nodes[i][0] == "lent":
                    made[i] = (lent or [])[nodes[i][1]]
                else:
                    made[i] = self._immutable(nodes[i], get, i in parts)
            return made[i]

        changeable = [i for i, node in enumerate(nodes) if node[0] in _CHANGEABLE]
        for i in changeable:
            made[i] = self._empty(nodes[i])
            if old and i in old:
                if type(old[i]) is not type(made[i]):
                    raise Broken(f"a {type(old[i]).__name__} that becomes a {type(made[i]).__name__}")
                made[i] = old[i]
        for own in (True, False):  # instances first, as they may be keys whose hash needs their content
            for i in changeable:
                if (nodes[i][0] == "own") == own:
                    _fill(made[i], nodes[i], get)
        return [get(ref) for ref in refs], [made[i] for i in changeable]

    def _node(self, value: Any, ref: Callable[[Any], Any]) -> Node:
        kind: Any = type(value)
        handle = self.home(value)
        if handle is not None:
            return ["home", handle]
        if kind in _BASES or kind is bytearray:
            return _content(kind, value, ref)
        common = self.name_of(kind)
        if common is not None:
            return _own(common, kind, value, ref)
        if kind in (complex, range, slice):
            parts = (value.real, value.imag) if kind is complex else (value.start, value.stop, value.step)
            return [kind.__name__, *map(ref, parts)]
        if kind in _VIEWS:
            items = [*value]
            columns = [[k for k, _ in items], [v for _, v in items]] if _VIEWS[kind] == "items" else [items]
            return [_VIEWS[kind], *([ref(item) for item in column] for column in columns)]
        if isinstance(value, type):
            name = str(getattr(value, "__name__", ""))
            if _TYPES.get(name) is value:
                return ["type", name]
            common = self.name_of(value)
            return ["class", common] if common is not None else self.offer(value)
        if value is Ellipsis or value is NotImplemented:
            return ["constant", repr(value)]
        if kind is memoryview:
            return ["memoryview", value.tobytes().decode("latin-1"), value.format, list(value.shape or ())]
        name = _known_as(kind)
        if name in _STANDARD:
            return ["standard", name, _STANDARD[name][0](value)]
        if name == "collections.deque":
            return ["deque", [ref(item) for item in value], value.maxlen]
        if name.startswith("collections.") and kind.__name__ in _DICTS:
            return [*_content(dict, value, ref), kind.__name__]
        if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
            return ["numpy", [ref(item) for item in value.ravel().tolist()], str(value.dtype), list(value.shape)]
        for base in _BASES:
            if isinstance(value, base):
                return ["like", _content(base, value, ref), self.offer(value)]
        return self.offer(value)

    def _empty(self, node: Node) -> Any:
        if node[0] == "own":
            kind = self.class_of(node[1])
            base = _base_of(kind)
            if base not in (object, *_CHANGEABLE_BASES) or hasattr(kind, "_member_map_"):
                raise Broken(f"an instance of {node[1]} without its content")
            return base.__new__(kind)
        if node[0] == "deque":
            from collections import deque

            return deque(maxlen=node[2])
        if node[0] == "dict" and len(node) == 4:
            import collections

            if node[3] not in _DICTS:
                raise Broken(f"a dict of kind {node[3]!r}")
            return getattr(collections, node[3])()
        return _TYPES[node[0]]()

    def _immutable(self, node: Node, get: Callable[[Any], Any], part: bool) -> Any:
        """part: whether the node is part of an instance of a class that both ends have, or of an array."""
        match node:
            case [("tuple" | "frozenset") as name, content]:
                return _TYPES[name]([get(ref) for ref in content])
            case [("str" | "int" | "float") as name, content]:
                return _TYPES[name](content)
            case ["bytes", content]:
                return content.encode("latin-1")
            case [("complex" | "range" | "slice") as name, *parts]:
                return _TYPES[name](*map(get, parts))
            case ["keys", keys]:
                return dict.fromkeys(get(key) for key in keys).keys()
            case ["values", values]:
                return dict(enumerate(get(value) for value in values)).values()
            case ["items", keys, values]:
                return {get(key): get(value) for key, value in zip(keys, values, strict=True)}.items()
            case ["constant", name]:
                return _CONSTANTS[name]
            case ["type", name]:
                return _TYPES[name]
            case ["memoryview", content, code, shape]:
                view = memoryview(content.encode("latin-1"))
                return view if (code, len(shape)) == ("B", 1) else view.cast(code, shape)
            case ["standard", name, arguments]:
                return _standard(name, arguments)
            case ["numpy", content, dtype, shape]:
                return self.array(_numpy([get(ref) for ref in content], dtype, shape))
            case ["class", name]:
                return self.class_of(name)
            case ["enum", name, member]:
                return self.class_of(name)._member_map_[member]
            case ["flag", name, int(number)] if hasattr(self.class_of(name), "_member_map_"):
                return self.class_of(name)(number)
            case ["whole", name, content, names, values]:
                made = self._whole(self.class_of(name), content, get)
                _set_state(made, names, values, get)
                return made
            case ["home", handle]:
                return self.exports[handle]
            case ["like", [name, *_] as content, other]:
                value = _TYPES[name]() if name in _CHANGEABLE else self._immutable(content, get, part)
                value = value if part else self._dress(type(value), other)(value)
                if name in _CHANGEABLE:
                    _fill(value, content, get)
                return value
            case [("ref" | "error"), *_]:
                return self.inert(node) if part else self.adopt(node)
            case _:
                return self.resolve(node)

    def _whole(self, kind: type, content: Node, get: Callable[[Any], Any]) -> Any:
        """An instance of a class that derives from an immutable type, such as a NamedTuple."""
        base: Any = _base_of(kind)
        if content[0] != base.__name__ or base in (object, *_CHANGEABLE_BASES) or hasattr(kind, "_member_map_"):
            raise Broken(f"an instance of {kind.__name__} made of a {content[0]}")
        return base.__new__(kind, self._immutable(content, get, True))

    def _dress(self, kind: type, node: Node) -> type:
        """A subclass of `kind` that requests attributes which `kind` lacks from the other end."""
        remote = self.adopt(node)

        def read(_: Any, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(remote, name)

        return type(kind.__name__, (kind,), {"__getattr__": read, "_wire_home": remote})


def _parts_of_ours(nodes: list[Node]) -> set[int]:
    """The nodes that instances of shared classes, and arrays, consist of, at any depth."""
    queue = [i for i, node in enumerate(nodes) if node[0] in ("own", "whole", "numpy")]
    parts = set(queue)
    for i in queue:  # grows on the way
        for ref in _refs_in(nodes[i]):
            if type(ref) is list and ref[0] not in parts:
                parts.add(ref[0])
                queue.append(ref[0])
    return parts


def _refs_in(node: Node) -> list[Any]:
    match node:
        case [("own" | "whole"), _, content, _, values]:
            return values if content is None else [*values, *_refs_in(content)]
        case ["like", content, _]:
            return _refs_in(content)
        case [("list" | "tuple" | "set" | "frozenset" | "dict" | "deque" | "keys" | "values" | "items" | "numpy"), *_]:
            return [ref for column in node[1:] if type(column) is list for ref in column]
        case _:
            return []


def _content(kind: type, value: Any, ref: Callable[[Any], Any]) -> Node:
    """The node of an instance of `kind` or of a subclass, which is decoded like its base."""
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


def _base_of(kind: type) -> type:
    return next((base for base in (*_BASES, bytearray) if issubclass(kind, base)), object)


def shareable(kind: type) -> bool:
    """Whether instances can be made from their content and state alone, unlike those of Thread or an exception."""
    base: Any = _base_of(kind)
    try:
        base.__new__(kind)
    except TypeError:
        return hasattr(kind, "_member_map_")
    return True


def _own(name: str, kind: Any, value: Any, ref: Callable[[Any], Any]) -> Node:
    """An instance of a class that both ends have: a member of an Enum by its name, others by content and state."""
    if hasattr(kind, "_member_map_"):
        member = next((n for n, v in kind._member_map_.items() if v is value), None)
        return ["enum", name, member] if member is not None else ["flag", name, int(value.value)]
    state = _state(value)
    refs = [list(state), [ref(v) for v in state.values()]]
    base = _base_of(kind)
    if base is object:
        return ["own", name, None, *refs]
    return ["own" if base in _CHANGEABLE_BASES else "whole", name, _content(base, value, ref), *refs]


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _state(value: Any) -> dict[str, Any]:
    """The attributes of an instance, in its slots and elsewhere."""
    missing = object()
    slots = {name: found for name in _slots(type(value)) if (found := getattr(value, name, missing)) is not missing}
    others = {name: v for name, v in getattr(value, "__dict__", {}).items() if type(name) is str}
    return slots | others


def hides(kind: type, name: str) -> bool:
    """Whether an attribute of an instance would hide a method, a property or the like."""
    hidden = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return callable(hidden) or hasattr(type(hidden), "__get__")


def _set_state(made: Any, names: list[Any], values: list[Any], get: Callable[[Any], Any]) -> None:
    """Set the attributes of an instance, except those that would hide what its class defines."""
    slots = set(_slots(type(made)))
    if hasattr(made, "__dict__"):
        made.__dict__.clear()
    for name, value in zip(names, values, strict=True):
        if type(name) is not str:
            raise Broken(f"an attribute called {name!r}")
        if name in slots or (hasattr(made, "__dict__") and not hides(type(made), name)):
            object.__setattr__(made, name, get(value))


def _fill(made: Any, node: Node, get: Callable[[Any], Any]) -> None:
    match node:
        case ["own", _, content, names, values]:
            _set_state(made, names, values, get)
            base = _base_of(type(made)).__name__
            if base != ("object" if content is None else content[0]):
                raise Broken(f"an instance of {type(made).__name__} without its content")
            if content is not None:
                _fill(made, content, get)
        case ["list", items]:
            list.__setitem__(made, slice(None), [get(ref) for ref in items])
        case ["set", items]:
            set.clear(made)
            set.update(made, [get(ref) for ref in items])
        case ["dict", keys, values, *_]:
            dict.clear(made)
            dict.update(made, [(get(key), get(value)) for key, value in zip(keys, values, strict=True)])
        case ["bytearray", content]:
            bytearray.__setitem__(made, slice(None), content.encode("latin-1"))
        case ["deque", items, _]:
            made.clear()
            made.extend(get(ref) for ref in items)
        case _:
            raise Broken(f"a node of kind {node[0]!r}")


def _known_as(kind: type) -> str:
    """`"decimal.Decimal"` for the class that this module has under this name; "" for one that only claims to be it."""
    module, name = kind.__module__, kind.__qualname__
    real = getattr(sys.modules.get(module), name, None) if isinstance(module, str) else None
    return f"{module}.{name}" if real is kind else ""


def _zone(value: Any) -> Any:
    """The time zone of a date: its name, or its offset from UTC at that time in microseconds."""
    zone = value.tzinfo
    if zone is None:
        return None
    if _known_as(type(zone)) == "zoneinfo.ZoneInfo" and zone.key:
        return zone.key
    offset = value.utcoffset()
    return None if offset is None else _microseconds(offset)


def _zone_of(found: Any) -> Any:
    if found is None:
        return None
    if type(found) is str:
        return __import__("zoneinfo").ZoneInfo(found)
    datetime = __import__("datetime")
    return datetime.timezone(datetime.timedelta(microseconds=found))


def _microseconds(delta: Any) -> int:
    return (int(delta.days) * 86400 + int(delta.seconds)) * 10**6 + int(delta.microseconds)


def _time(value: Any) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, _zone(value), value.fold]


def _build_time(kind: Any, *arguments: Any) -> Any:
    *numbers, zone, fold = arguments
    return kind(*numbers, tzinfo=_zone_of(zone), fold=fold)


def _build(kind: Any, *arguments: Any) -> Any:
    return kind(*arguments)


# How the types of the standard library that count as data are encoded and decoded.
_STANDARD: dict[str, tuple[Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "decimal.Decimal": (lambda v: [str(v)], _build),
    "fractions.Fraction": (lambda v: [v.numerator, v.denominator], _build),
    "datetime.date": (lambda v: [v.year, v.month, v.day], _build),
    "datetime.time": (_time, _build_time),
    "datetime.datetime": (lambda v: [v.year, v.month, v.day, *_time(v)], _build_time),
    "datetime.timedelta": (lambda v: [v.days, v.seconds, v.microseconds], _build),
    "datetime.timezone": (lambda v: [_microseconds(v.utcoffset(None))], lambda _, offset: _zone_of(offset)),
    "zoneinfo.ZoneInfo": (lambda v: [v.key], _build),
    "uuid.UUID": (lambda v: [str(v)], _build),
    "pathlib.PosixPath": (lambda v: [str(v)], _build),
    "pathlib.PurePosixPath": (lambda v: [str(v)], _build),
    "pathlib.PureWindowsPath": (lambda v: [str(v)], _build),
    "array.array": (lambda v: [v.typecode, v.tolist()], _build),
}


def _standard(name: str, arguments: list[Any]) -> Any:
    for argument in arguments:
        for part in argument if type(argument) is list else [argument]:
            if type(part) not in _SCALARS:
                raise Broken(f"a {name} made of {part!r}")
    module, _, kind = name.partition(".")
    build = _STANDARD[name][1]
    return build(getattr(__import__(module), kind), *arguments)


def _numpy(content: Any, dtype: str, shape: list[int]) -> Any:
    """A numpy array as an array, a numpy scalar as the plain number that it holds."""
    if not shape:
        return content[0]
    import numpy

    return numpy.array(content, dtype=object if dtype == "object" else dtype).reshape(shape)


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500].removesuffix(": ")
    except BaseException:
        return type(error).__name__


def read_frame(fd: int) -> bytes:
    """The next frame. Raises `EOFError` if the other end has closed the connection."""
    return _read(fd, frame_size(_read(fd, 8)))


def frame_size(head: bytes) -> int:
    size = int.from_bytes(head, "little")
    if size > _MAX_MESSAGE:
        raise EOFError
    return size


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


def pack(message: Any) -> bytes:
    return "".join(_ENCODE(message, 0)).encode()


def unpack(data: bytes) -> Any:
    return _SCAN(data.decode(), 0)[0]


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
