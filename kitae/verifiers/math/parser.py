r"""From tokens to a tree: `Parser(split_tokens(r"\frac12 x")).parse()` → ½ · x as a `Node`.

Recursive descent, one method for each level of the grammar; raises `Unreadable` for what it does not know and `TooBig`
for brackets that are nested too deep.
"""

from fractions import Fraction

from kitae.verifiers.math.lexer import END, Cursor, Depth, Token
from kitae.verifiers.math.tree import (
    UNKNOWN_FUNCTIONS,
    Node,
    Unreadable,
    integers_in,
    is_integer_condition,
    mentions,
    names_in,
    negated,
    number_node,
    over_integers,
    repeating_decimal,
    spelled,
)
from kitae.verifiers.math.units import MAGNITUDES, joined, measure_of, scaled

_RELATIONS = ("=", "<", ">", "<=", ">=", "!=", "≈", "∈", "≡")
_ZERO = Node("number", value=Fraction(0))
_TEMPERATURES = {"C": "celsius", "Celsius": "celsius", "F": "fahrenheit", "Fahrenheit": "fahrenheit"}
_DIFFERENTIALS = ("d", "∂")
_REMAINDER = Token("command", "bmod")


def _is_differential(node: Node) -> bool:
    """dx, ∂x, ∂f"""
    return node.kind == "mul" and node.args[0].kind == "name" and node.args[0].value in _DIFFERENTIALS


def _is_vector(node: Node) -> bool:
    return node.kind == "name" and node.value.startswith(("vec ", "overrightarrow "))


def _measured(node: Node, words: str) -> Node:
    """A number with the words after it, whose magnitudes are factors: 5 million dollars is 5000000 dollars."""
    first, _, rest = words.partition(" ")
    while (size := MAGNITUDES.get(first.lower())) is not None:
        node = scaled(node, Fraction(size))
        first, _, rest = rest.partition(" ")
    words = f"{first} {rest}".strip()
    return Node("unit", (node,), words) if words else node


def unit_of(node: Node) -> str | None:
    r"""The words of \frac{\text{m}}{\text{s}^2}: "m per s ^2"."""
    if node.kind == "text":
        return str(node.value)
    if node.kind == "pow" and node.args[1].kind == "number" and node.args[0].kind == "text":
        return f"{node.args[0].value} ^{node.args[1].value}"
    if node.kind in ("div", "unit", "mul"):
        parts = [unit_of(part) for part in node.args]
        if None not in parts:
            return {"div": " per ", "mul": " "}.get(node.kind, " ").join(map(str, parts))
    return None


def built_set(head: Node, condition: Node) -> Node:
    """{x | x > 2}, {x ∈ ℤ | -2 < x < 3} → {-1, 0, 1, 2}, {2k : k ∈ ℤ}"""
    if is_integer_condition(condition) and head.kind != "name":
        return over_integers(head, {condition.args[0].value: condition.args[1].value})
    domain = head
    if condition.kind == "list" and condition.value in (",", "and"):  # {x | x ∈ ℤ, -2 < x < 3}
        domains = [part for part in condition.args if is_integer_condition(part)]
        rest = tuple(part for part in condition.args if not is_integer_condition(part))
        if len(domains) == 1 and rest:
            domain, condition = domains[0], rest[0] if len(rest) == 1 else Node("list", rest, condition.value)
    if not is_integer_condition(domain):
        return condition
    whole = integers_in(condition)
    return Node("whole", (condition,), domain.args[1].value) if whole is None else whole


def _together(larger: Node, smaller: Node) -> Node:
    node = joined(larger, smaller)
    if node is None:
        raise Unreadable("units that do not add up")
    return node


class Parser(Cursor):
    """Recursive descent over: list → relation → union → sum → product → power → primary."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self.deeper = Depth()
        self.no_bar = 0  # inside |…|, or before the bar of {x | …}, where a bar does not open
        self.no_colon = 0  # before the colon of {x : …}, which is no ratio
        self.in_interval = 0
        self.plain_set = False  # within braces without a backslash that are those of a set

    def parse(self) -> Node:
        node = self.listing()
        if self.at < len(self.tokens):
            raise Unreadable(f"{self.peek().value!r} is left over")
        return node

    def listing(self) -> Node:
        items, separator = [self.relation()], ""
        while self.is_op(",", ";", "and", "or"):
            while self.is_op(",", ";", "and", "or"):
                word = self.take().value
                separator = word if not separator or word in ("and", "or") else separator
            if self.peek() is END or self.is_op(")", "]", "}", "}}", "⟩"):
                break
            items.append(self.relation())
        conditions = {item.args[0].value: item.args[1].value for item in items if is_integer_condition(item)}
        if conditions and len(conditions) < len(items):
            items = [over_integers(item, conditions) for item in items if not is_integer_condition(item)]
        return items[0] if len(items) == 1 else Node("list", tuple(items), separator)

    def relation(self) -> Node:
        operands: list[Node] = []
        operators: list[str] = []
        if self.is_op(*_RELATIONS):
            if self.is_op("=", "≈", "≡"):
                self.at += 1
            else:
                operands.append(Node("name", value="?"))
        if not operands:
            operands.append(self.union())
        while self.is_op(*_RELATIONS):
            operators.append(self.take().value)
            operands.append(self.union())
        if "≡" in operators:  # 10 ≡ 3 (mod 7): only the last is the answer
            operands, operators = [operands[0], operands[-1]], ["="]
            if not names_in(operands[0]):
                return operands[-1]
        return Node("relation", tuple(operands), tuple(operators)) if operators else operands[0]

    def union(self) -> Node:
        node = self.sum()
        while self.is_op("∪", "∩", "∖"):
            operator = self.take().value
            node = Node("union", (node, self.sum()), operator)
        return node

    def sum(self) -> Node:
        node = self.product()
        while self.is_op("+", "-", "±", "∓"):
            operator = self.take().value
            right = self.product()
            if operator in "±∓":
                node = Node("pm", (node, right), operator)
            elif node.kind == right.kind == "unit":
                node = _together(node, right if operator == "+" else negated(right))
            else:
                node = Node("add", (node, right if operator == "+" else Node("neg", (right,))))
        return node

    def product(self) -> Node:
        if self.accept("-"):
            node = self.product()
            if node.kind == "call" and node.value == "mod":  # -1 mod 5 is 4
                return Node("call", (negated(node.args[0]), node.args[1]), "mod")
            return negated(node)
        if self.accept("+"):
            return self.product()
        if self.is_op("±", "∓"):
            operator = self.take().value
            return Node("pm", (_ZERO, self.product()), operator)
        if self.is_op("$", "€", "£", "¥", "₹"):
            sign, amount = self.take().value, self.product()
            return (
                Node("unit", amount.args, f"{sign} {amount.value}")
                if amount.kind == "unit"
                else Node("unit", (amount,), sign)
            )
        node = self.power()
        while True:
            if self.is_op("*", "×"):
                cross = self.take().value == "×" and _is_vector(node)
                right = self.signed_power()
                if cross and _is_vector(right):
                    raise Unreadable("a cross product")
                node = Node("mul", (node, right))
            elif self.is_op("/") and self.peek(1).kind == "text":
                self.at += 1
                node = Node("unit", (node,), "per " + self.unit_words())
            elif self.accept("/"):
                node = Node("div", (node, self.signed_power()))
            elif self.peek() == _REMAINDER:
                self.at += 1
                node = Node("call", (node, self.tex_argument()), "mod")
            elif not self.no_colon and self.accept(":"):
                node = Node("ratio", (*(node.args if node.kind == "ratio" else (node,)), self.signed_power()))
            elif self.is_op("€", "£", "¥", "₹", "$", "¢"):
                node = Node("unit", (node,), self.take().value)
            elif self.peek().kind == "text":
                if node.kind == "text":
                    node = Node("text", value=f"{node.value} {self.take().value}")
                else:
                    node = _measured(node, self.unit_words())
            elif node.kind in ("unit", "degree") and self.peek().kind == "number":
                node = self.smaller_part(node)
            elif node.kind == "text" and self.starts_factor() and measure_of(node.value).currency:  # USD 5
                node = Node("unit", (self.power(),), node.value)
            elif self.starts_factor():
                node = self.juxtaposed(node)
            else:
                return node

    def smaller_part(self, larger: Node) -> Node:
        """The second part of an amount: 4 inches in 3 feet 4 inches, 30' in 45° 30'. A number after a unit is never a
        factor."""
        smaller = number_node(self.take().value)
        if larger.kind == "degree" and self.accept("'"):
            size = Fraction(1, 3_600) if self.accept("'") else Fraction(1, 60)
            return Node("degree", (Node("add", (larger.args[0], scaled(smaller, size))),))
        if larger.kind != "unit" or self.peek().kind != "text":
            raise Unreadable("a number after a unit")
        return _together(larger, Node("unit", (smaller,), self.unit_words()))

    def juxtaposed(self, left: Node) -> Node:
        """`2x` is a product, and `1\\frac{1}{2}` and `1 1/2` are mixed numbers."""
        whole = left.kind == "number" and left.value.denominator == 1 and self.tokens[self.at - 1].kind == "number"
        token = self.peek()
        if whole and token.kind == "number":
            if left.args or not (token.spaced and self.peek(1) == Token("op", "/") and self.peek(2).kind == "number"):
                raise Unreadable("two numbers side by side")
            top, _, bottom = self.take(), self.take(), self.take()
            if not (top.value.isdigit() and bottom.value.isdigit() and int(top.value) < int(bottom.value)):
                raise Unreadable("two numbers side by side")
            return self.postfix(Node("number", value=left.value + Fraction(int(top.value), int(bottom.value))))
        right = self.power()
        if (words := unit_of(right)) is not None:
            return _measured(left, words)
        if whole and token == Token("command", "frac"):
            fraction = right.args[0] if right.kind in ("percent", "degree") else right
            if fraction.kind == "div" and all(part.kind == "number" for part in fraction.args):
                top_value, bottom_value = (part.value for part in fraction.args)
                if 0 < top_value < bottom_value:
                    mixed = Node("number", value=left.value + top_value / bottom_value)
                    return mixed if fraction is right else Node(right.kind, (mixed,))
        return Node("mul", (left, right))

    def unit_words(self) -> str:
        """`cm^2`, `square feet`, `miles / hour`, `miles per hour`."""
        words = [self.take().value]
        while True:
            if self.accept("^"):
                words.append(f"^{self.tex_argument().value}")
            elif self.is_op("/") and self.peek(1).kind == "text":
                self.at += 1
                words.append("per")
            elif self.peek().kind == "text" or (self.is_op("*", "×") and self.peek(1).kind == "text"):
                self.accept("*", "×")
                words.append(self.take().value)
            elif (self.is_op("-") or self.peek() == Token("name", "a")) and self.peek(1).kind == "text":
                self.at += 1  # "foot-pounds", "dollars a day"
            else:
                return " ".join(words)

    def starts_factor(self) -> bool:
        token = self.peek()
        if token.kind == "op":
            opens = ("(", "{", "{{", "⌊", "⌈", "⟨") if self.in_interval else ("(", "{", "{{", "[", "⌊", "⌈", "⟨")
            return token.value in opens or (token.value == "|" and not self.no_bar)
        return token.kind in ("number", "name", "function", "constant") or (
            token.kind == "command" and token.value != "end" and token != _REMAINDER
        )

    def signed_power(self) -> Node:
        if self.accept("-"):
            return negated(self.signed_power())
        return self.signed_power() if self.accept("+") else self.power()

    def power(self) -> Node:
        node = self.postfix(self.primary())
        if self.accept("^"):
            if self.is_op("'"):
                self.at += 1
                return node
            exponent = self.exponent()
            if self.accept("_"):  # both indices belong to the a
                node = self.subscript(node)
            return self.postfix(Node("pow", (node, exponent)))
        return node

    def exponent(self) -> Node:
        """Tower of powers: to the right first."""
        if self.accept("-"):
            return negated(self.exponent())
        self.accept("+")
        node = self.group() if self.is_op("{") else self.postfix(self.primary(), subscripts=False)
        return Node("pow", (node, self.exponent())) if self.accept("^") else node

    def postfix(self, node: Node, *, subscripts: bool = True) -> Node:
        while True:
            if self.accept("!"):
                node = Node("call", (node,), "fac2") if self.accept("!") else Node("factorial", (node,))
            elif self.accept("%"):
                node = Node("percent", (node,))
            elif self.accept("°"):
                scale = _TEMPERATURES.get(self.peek().value) if self.peek().kind in ("name", "text") else None
                self.at += scale is not None
                node = Node("unit", (node,), scale) if scale else Node("degree", (node,))
            elif self.accept("'"):
                node = Node("name", value=f"{spelled(node)}'")
            elif subscripts and self.accept("_"):
                node = self.subscript(node)
            else:
                return node

    def subscript(self, node: Node) -> Node:
        if not self.is_op("{"):
            index = self.tex_argument()
            if node.kind == "number" and index.kind == "number":
                return Node("based", value=(node.value, int(index.value)))
            return Node("name", value=f"{spelled(node)}_{spelled(index)}")
        tokens = self.raw_group()
        if node.kind == "number" and len(tokens) == 1 and tokens[0].value.isdigit():
            return Node("based", value=(node.value, int(tokens[0].value)))
        return Node("name", value=f"{spelled(node)}_{''.join(token.value for token in tokens)}")

    def tex_argument(self) -> Node:
        """`{…}`, or the one token that follows; of a number, its first digit: `\\frac12` is 1/2."""
        if self.is_op("{"):
            return self.group()
        token = self.peek()
        if token.kind == "number" and len(token.value) > 1:
            digit, rest = token.value[0], token.value[1:]
            if not digit.isdigit() or rest[0] in "eE":
                raise Unreadable(f"{token.value} has no first digit that could stand alone")
            self.tokens[self.at] = Token("number", rest)
            return number_node(digit)
        return self.primary()

    def group(self) -> Node:
        self.expect("{")
        with self.deeper:
            node = self.listing()
        self.expect("}")
        return node

    def primary(self) -> Node:
        token = self.take()
        if token.kind == "number":
            return self.number(token)
        if token.kind == "name":
            if token.value in UNKNOWN_FUNCTIONS and self.is_op("(") and not self.peek().spaced:
                return self.function(token.value)
            if token.value == "C" and self.is_op("("):
                return self.choose(token)
            return Node("name", value=token.value)
        if token.kind == "constant":
            return Node("constant", value=token.value)
        if token.kind == "text":
            return Node("text", value=token.value)
        if token.kind == "function":
            return self.function(token.value)
        if token.kind == "command":
            return self.command(token.value)
        with self.deeper:
            return self.bracketed(token.value)

    def choose(self, token: Token) -> Node:
        """C(10, 3), or C times a bracket."""
        start = self.at
        bracket = self.primary()
        if bracket.kind == "sequence" and len(bracket.args) == 2:
            return Node("call", bracket.args, "binom")
        self.at = start
        return Node("name", value=token.value)

    def number(self, token: Token) -> Node:
        """A literal, with the period of a repeating decimal: `0.\\overline{3}`."""
        following = self.peek()
        if following == Token("op", ".") and self.peek(1) == Token("command", "overline"):
            self.at += 1
            return repeating_decimal(token.value + ".", self.overlined())
        if following == Token("command", "overline") and "." in token.value:
            return repeating_decimal(token.value, self.overlined())
        return number_node(token.value)

    def overlined(self) -> str:
        self.take()
        self.expect("{")
        digits = self.take()
        self.expect("}")
        if digits.kind != "number" or not digits.value.isdigit():
            raise Unreadable("the period of a decimal must be digits")
        return digits.value

    def bracketed(self, opening: str) -> Node:
        if opening == "|":
            self.no_bar += 1
            inside = self.listing()
            self.no_bar -= 1
            self.expect("|")
            return Node("call", (inside,), "abs")
        if opening in "⌊⌈":
            inside = self.listing()
            self.expect("⌋" if opening == "⌊" else "⌉")
            return Node("call", (inside,), "floor" if opening == "⌊" else "ceil")
        if opening == "⟨":
            inside = self.listing()
            self.expect("⟩")
            return Node("sequence", inside.args if inside.kind == "list" else (inside,), "()")
        if opening == "{{" or (opening == "{" and self.at == 1):
            return self.set_of("}}" if opening == "{{" else "}")
        if opening == "{":
            if self.plain_set and self.tokens[self.at - 2].value in ("{", ","):  # {{1}, {2}}
                return self.set_of("}", nested=True)
            inside = self.listing()
            self.expect("}")
            return inside
        if opening in "([" or opening == "]":
            return self.sequence(opening)
        raise Unreadable(f"{opening!r} cannot start an expression")

    def sequence(self, opening: str) -> Node:
        if self.is_op(")"):
            raise Unreadable("empty brackets")
        bars, self.no_bar = self.no_bar, 0
        self.in_interval += opening != "("
        inside = self.listing()
        self.in_interval -= opening != "("
        self.no_bar = bars
        closing = self.expect(")", "]", "[")
        if inside.kind == "list" and closing == "]" and inside.args[-1] == Node("constant", value="inf"):
            closing = ")"
        brackets = ("(" if opening == "]" else opening) + (")" if closing == "[" else closing)
        if brackets in ("(]", "[)") and not (inside.kind == "list" and len(inside.args) == 2):
            raise Unreadable("brackets that do not match")
        if inside.kind == "list" and inside.value in (",", ";"):
            return Node("sequence", inside.args, brackets)
        if brackets == "[]" and inside.kind == "sequence":
            return Node("sequence", (inside,), brackets)
        return inside

    def set_of(self, closing: str, *, nested: bool = False) -> Node:
        if self.accept(closing):
            return Node("constant", value="empty")
        self.no_bar += 1
        self.no_colon += 1
        self.plain_set, outer = closing == "}", self.plain_set
        start = self.at
        try:
            inside = self.listing()
        except Unreadable:  # a ratio in a set: its colon is no bar
            self.at, self.no_colon = start, 0
            inside = self.listing()
        self.plain_set = outer
        self.no_bar -= 1
        self.no_colon = 0
        if self.accept("|", "mid", ":"):
            condition = self.listing()
            self.expect(closing)
            return built_set(inside, condition)
        self.expect(closing)
        if closing == "}" and not nested and inside.kind != "list" and inside != Node("constant", value="empty"):
            return inside
        return Node("set", inside.args if inside.kind == "list" else (inside,))

    def function(self, name: str) -> Node:
        if name == "sqrt":
            return self.root()
        exponent = base = None
        while self.is_op("^", "_"):
            if self.take().value == "^":
                exponent = self.exponent()
            else:
                base = self.tex_argument()
        if self.is_op("(", "{", "["):
            opening = self.take().value
            with self.deeper:
                argument = self.bracketed(opening)
        else:
            argument = self.signed_power() if self.is_op("-") else self.power()
            while self.starts_factor() and self.peek().kind != "function":
                argument = Node("mul", (argument, self.power()))
        arguments = argument.args if argument.kind in ("list", "sequence") else (argument,)
        if name == "log" and base is not None:
            name, arguments = "logb", (*arguments, base)
        node = Node("call", arguments, name)
        if exponent is None:
            return node
        if exponent.kind == "number" and exponent.value == -1:
            return Node("call", arguments, f"arc{name}")
        return Node("pow", (node, exponent))

    def root(self) -> Node:
        degree: Node | None = None
        if self.accept("["):
            degree = self.listing()
            self.expect("]")
        argument = self.group() if self.is_op("{") else self.primary()
        return Node("root", (argument, degree if degree is not None else number_node("2")))

    def command(self, name: str) -> Node:
        if name == "frac":
            return self.fraction()
        if name in ("sum", "prod"):
            return self.series(name)
        if name == "partial":
            return Node("name", value="∂")
        if name in ("binom", "dbinom", "tbinom"):
            return Node("call", (self.tex_argument(), self.tex_argument()), "binom")
        if name == "begin":
            return self.environment()
        if name == "mathbb":
            return Node("constant", value=f"set {spelled(self.tex_argument())}")
        if name in ("overline", "hat", "vec", "bar", "overrightarrow", "widehat", "dot"):
            accent = "overline" if name == "bar" else name
            return Node("name", value=f"{accent} {spelled(self.tex_argument())}")
        if name in ("angle", "triangle"):
            letters = ""
            while self.peek().kind in ("name", "text", "constant"):
                letters += self.take().value
            return Node("name", value=f"{name} {letters}")
        raise Unreadable(f"\\{name}")

    def fraction(self) -> Node:
        """A quotient. dy/dx is one name, and d/dx is an operator, which is not supported."""
        top, bottom = self.tex_argument(), self.tex_argument()
        if _is_differential(bottom):
            if top.kind == "name" and top.value in _DIFFERENTIALS:
                raise Unreadable("a derivative")
            if _is_differential(top):
                return Node("name", value=f"{spelled(top)}/{spelled(bottom)}")
        return Node("div", (top, bottom))

    def series(self, name: str) -> Node:
        """A sum or product over an integer index; the product after it is the summand."""
        self.expect("_")
        start = self.group()
        self.expect("^")
        end = self.tex_argument()
        if start.kind != "relation" or start.value != ("=",) or start.args[0].kind != "name":
            raise Unreadable("a sum without an index")
        if mentions(end, "constant", "inf"):
            raise Unreadable("an infinite sum")
        with self.deeper:
            return Node("series", (*start.args, end, self.product()), name)

    def environment(self) -> Node:
        name = self.environment_name()
        if name == "array":
            self.raw_group()
        elif name not in ("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "vmatrix", "cases"):
            raise Unreadable(f"the environment {name}")
        rows: list[Node] = [Node("row")]
        with self.deeper:
            while self.peek() != Token("command", "end"):
                if self.accept("\\\\"):
                    rows.append(Node("row"))
                elif self.accept("&"):
                    if self.is_op("&"):
                        raise Unreadable("a cell with nothing in it")
                elif name == "cases" and self.accept("and", ",", ";"):  # "and" is how \\text{if} is read
                    continue
                else:
                    cell = self.relation()
                    rows[-1] = Node("row", (*rows[-1].args, cell))
        self.take()
        self.environment_name()
        rows = [row for row in rows if row.args]
        if not rows:
            raise Unreadable(f"{name} with nothing in it")
        if name == "vmatrix":
            return Node("call", tuple(cell for row in rows for cell in row.args), "det")
        if name == "cases" and all(len(row.args) == 1 for row in rows):  # a system of equations
            return Node("list", tuple(row.args[0] for row in rows), "and")
        return Node("cases" if name == "cases" else "matrix", tuple(rows))

    def environment_name(self) -> str:
        self.expect("{")
        name = ""
        while not self.is_op("}"):
            name += self.take().value
        self.take()
        return name

    def raw_group(self) -> list[Token]:
        """The text in {…}, unparsed."""
        self.expect("{")
        start, depth = self.at, 1
        while depth:
            token = self.take()
            depth += (token == Token("op", "{")) - (token == Token("op", "}"))
        return self.tokens[start : self.at - 1]
