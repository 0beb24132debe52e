r"""From tokens to a tree: `Parser(split_tokens(r"\frac12 x")).parse()` → ½ · x as a `Node`.

Recursive descent, one method for each level of the grammar; raises `Unreadable` for what it does not know and `TooBig`
for brackets that are nested too deep.
"""

from fractions import Fraction

from kitae.verifiers.math.tokens import END, Cursor, Depth, Token
from kitae.verifiers.math.tree import (
    Node,
    Unreadable,
    is_integer_condition,
    negated,
    number_node,
    repeating_decimal,
    spelled,
)

_RELATIONS = ("=", "<", ">", "<=", ">=", "!=", "≈", "∈")
_ZERO = Node("number", value=Fraction(0))


class Parser(Cursor):
    """Recursive descent over: list → relation → union → sum → product → power → primary."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self.deeper = Depth()
        self.no_bar = 0  # inside |…|, or before the bar of {x | …}: a bar does not open
        self.in_interval = 0

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
        items = [item for item in items if not is_integer_condition(item)] or items
        return items[0] if len(items) == 1 else Node("list", tuple(items), separator)

    def relation(self) -> Node:
        operands: list[Node] = []
        operators: list[str] = []
        if self.is_op(*_RELATIONS):
            if self.is_op("=", "≈"):
                self.at += 1
            else:
                operands.append(Node("name", value="?"))
        if not operands:
            operands.append(self.union())
        while self.is_op(*_RELATIONS):
            operators.append(self.take().value)
            operands.append(self.union())
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
            else:
                node = Node("add", (node, right if operator == "+" else Node("neg", (right,))))
        return node

    def product(self) -> Node:
        if self.accept("-"):
            return negated(self.product())
        if self.accept("+"):
            return self.product()
        if self.is_op("±", "∓"):
            operator = self.take().value
            return Node("pm", (_ZERO, self.product()), operator)
        if self.is_op("$", "€", "£", "¥", "₹"):
            sign = self.take().value
            return Node("unit", (self.product(),), sign)
        node = self.power()
        while True:
            if self.accept("*"):
                node = Node("mul", (node, self.signed_power()))
            elif self.is_op("/") and self.peek(1).kind == "text":
                self.at += 1
                node = Node("unit", (node,), "per " + self.unit_words())
            elif self.accept("/"):
                node = Node("div", (node, self.signed_power()))
            elif self.accept(":"):
                node = Node("ratio", (*(node.args if node.kind == "ratio" else (node,)), self.signed_power()))
            elif self.is_op("€", "£", "¥", "₹", "$", "¢"):
                node = Node("unit", (node,), self.take().value)
            elif self.peek().kind == "text":
                if node.kind == "text":
                    node = Node("text", value=f"{node.value} {self.take().value}")
                else:
                    node = Node("unit", (node,), self.unit_words())
            elif self.starts_factor():
                node = self.juxtaposed(node)
            else:
                return node

    def juxtaposed(self, left: Node) -> Node:
        """`2x` is a product, and `1\\frac{1}{2}` and `1 1/2` are mixed numbers."""
        whole = left.kind == "number" and left.value.denominator == 1 and self.tokens[self.at - 1].kind == "number"
        token = self.peek()
        if whole and token.kind == "number":
            if not (token.spaced and self.peek(1) == Token("op", "/") and self.peek(2).kind == "number"):
                raise Unreadable("two numbers side by side")
            top, _, bottom = self.take(), self.take(), self.take()
            if not (top.value.isdigit() and bottom.value.isdigit() and int(top.value) < int(bottom.value)):
                raise Unreadable("two numbers side by side")
            return Node("number", value=left.value + Fraction(int(top.value), int(bottom.value)))
        right = self.power()
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
            elif self.peek().kind == "text" or (self.is_op("*") and self.peek(1).kind == "text"):
                self.accept("*")
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
            token.kind == "command" and token.value != "end"
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
            return self.postfix(Node("pow", (node, self.exponent())))
        return node

    def exponent(self) -> Node:
        """Tower of powers: to the right first."""
        if self.accept("-"):
            return negated(self.exponent())
        self.accept("+")
        node = self.group() if self.is_op("{") else self.postfix(self.primary())
        return Node("pow", (node, self.exponent())) if self.accept("^") else node

    def postfix(self, node: Node) -> Node:
        while True:
            if self.accept("!"):
                node = Node("factorial", (node,))
            elif self.accept("%"):
                node = Node("percent", (node,))
            elif self.accept("°"):
                scale = self.peek()
                if scale.kind == "name" and scale.value in "CF":
                    self.at += 1
                node = Node("degree", (node,))
            elif self.accept("'"):
                node = Node("name", value=f"{spelled(node)}'")
            elif self.accept("_"):
                node = self.subscript(node)
            else:
                return node

    def subscript(self, node: Node) -> Node:
        index = self.tex_argument()
        if node.kind == "number" and index.kind == "number":
            return Node("based", value=(node.value, int(index.value)))
        return Node("name", value=f"{spelled(node)}_{spelled(index)}")

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
        brackets = ("(" if opening == "]" else opening) + (")" if closing == "[" else closing)
        if brackets in ("(]", "[)") and not (inside.kind == "list" and len(inside.args) == 2):
            raise Unreadable("brackets that do not match")
        if inside.kind == "list" and inside.value in (",", ";"):
            return Node("sequence", inside.args, brackets)
        if brackets == "[]" and inside.kind == "sequence":
            return Node("sequence", (inside,), brackets)
        return inside

    def set_of(self, closing: str) -> Node:
        if self.accept(closing):
            return Node("constant", value="empty")
        self.no_bar += 1
        inside = self.listing()
        self.no_bar -= 1
        if self.accept("|", "mid", ":"):
            inside = self.listing()
            self.expect(closing)
            return inside
        if inside.kind == "ratio" and self.is_op(*_RELATIONS):
            raise Unreadable("a set with a condition")
        self.expect(closing)
        if closing == "}" and inside.kind != "list":
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
            return Node("call", (*arguments, base), "logb")
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
            return Node("div", (self.tex_argument(), self.tex_argument()))
        if name in ("binom", "dbinom", "tbinom"):
            return Node("call", (self.tex_argument(), self.tex_argument()), "binom")
        if name == "begin":
            return self.environment()
        if name == "mathbb":
            return Node("constant", value=f"set {spelled(self.tex_argument())}")
        if name in ("overline", "hat", "vec", "bar", "overrightarrow", "widehat", "dot"):
            return Node("name", value=f"{name} {spelled(self.tex_argument())}")
        if name in ("angle", "triangle"):
            letters = ""
            while self.peek().kind in ("name", "text", "constant"):
                letters += self.take().value
            return Node("name", value=f"{name} {letters}")
        raise Unreadable(f"\\{name}")

    def environment(self) -> Node:
        name = self.environment_name()
        if name == "array":
            self.skip_group()
        elif name not in ("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix"):
            raise Unreadable(f"the environment {name}")
        rows: list[Node] = [Node("row")]
        with self.deeper:
            while self.peek() != Token("command", "end"):
                if self.accept("\\\\"):
                    rows.append(Node("row"))
                elif self.accept("&"):
                    continue
                else:
                    cell = self.relation()
                    rows[-1] = Node("row", (*rows[-1].args, cell))
        self.take()
        self.environment_name()
        return Node("matrix", tuple(row for row in rows if row.args))

    def environment_name(self) -> str:
        self.expect("{")
        name = ""
        while not self.is_op("}"):
            name += self.take().value
        self.take()
        return name

    def skip_group(self) -> None:
        self.expect("{")
        while not self.accept("}"):
            self.take()
