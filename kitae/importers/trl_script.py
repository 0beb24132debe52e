"""A script for TRL, read and never run: the trainer that it makes, its settings, and the functions that it hands over.

Values are read where they are literals, names bound to such, or calls that are known (load_dataset, LoraConfig, the
config classes). Names are looked up as they are bound above the line that uses them, in whatever block. Reward
functions and tools stay where they are if the script may be imported (its work stands below `if __name__ ==
"__main__"`, or in functions); otherwise they are copied, with the imports, functions and assignments that they need,
into a file of their own, since importing the script would train.
"""

import ast
import operator
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kitae.errors import ConfigError
from kitae.importers.sources import DataSource
from kitae.importers.translation import Unread
from kitae.importers.trl_rewards import Reward

_TRAINERS = {
    "GRPOTrainer": "grpo", "RLOOTrainer": "rloo", "SFTTrainer": "sft", "DPOTrainer": "dpo", "KTOTrainer": "kto",
    "RewardTrainer": "reward",
}  # fmt: skip
_POSITIONS = {  # of what trainers take by position
    "grpo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "rloo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "dpo": ("model", "ref_model", "args"), "kto": ("model", "ref_model", "args"),
    "sft": ("model", "args"), "reward": ("model", "args"),
}  # fmt: skip
_HARMLESS = ("select_columns", "remove_columns", "rename_column", "with_format", "shuffle", "cast_column")
_Functions = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Script:
    """What a script says: `Script("grpo", {"model": "…", "beta": 0.04}, {"run_rewards.py": "…"})`.

    files: the functions that had to be copied, by path.
    """

    trainer: str
    given: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)


def read_script(path: Path, beside: Path, flags: Mapping[str, Any] | None = None) -> Script:
    """beside: the recipe, next to which copied functions are put. flags: of its command line, where it has one."""
    try:
        tree = ast.parse(path.read_text("utf-8"), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return _Reader(path, tree, beside, flags).script()


class _Reader:
    def __init__(self, path: Path, tree: ast.Module, beside: Path, flags: Mapping[str, Any] | None) -> None:
        self.path, self.tree, self.flags = path, tree, flags
        self.level = list(_level(tree.body))  # statements of the module's own names, those in blocks too
        self.functions = {node.name: node for node in self.level if isinstance(node, _Functions | ast.ClassDef)}
        self.importable = {node.name for node in tree.body if isinstance(node, _Functions | ast.ClassDef)}
        self.imported: dict[str, tuple[str, str]] = {}
        self.bound: dict[str, list[tuple[int, ast.expr]]] = {}
        self.assigned: dict[str, dict[str, ast.expr]] = {}  # attributes that are set on a name: args.beta = 0.04
        for node in ast.walk(tree):
            self._note(node)
        self.copy = beside.with_name(f"{beside.stem.replace('-', '_')}_functions.py")
        self.works = self._works_on_import()
        self.copied: list[str] = []
        self.readers: list[str] = []

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self.imported[alias.asname or alias.name] = (node.module or "", alias.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self.bound.setdefault(target.id, []).append((node.lineno, node.value))
                elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    self.assigned.setdefault(target.value.id, {})[target.attr] = node.value
                elif isinstance(target, ast.Tuple):
                    for place, name in enumerate(target.elts):
                        part = ast.copy_location(ast.Subscript(node.value, ast.Constant(place), ast.Load()), node)
                        if isinstance(name, ast.Name):
                            self.bound.setdefault(name.id, []).append((node.lineno, part))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            self.bound.setdefault(node.target.id, []).append((node.lineno, node.value))

    def _works_on_import(self) -> bool:
        """Whether importing the script does more than define: calls at its top level, beyond a guarded main."""
        for node in self.tree.body:
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                continue
            if not isinstance(node, _Functions | ast.ClassDef | ast.Import | ast.ImportFrom):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Call) and not ast.unparse(inner.func).startswith(("re.", "os.environ")):
                        return True
        return False

    def script(self) -> Script:
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and _name(node.func) in _TRAINERS]
        if len(calls) != 1:
            known = ", ".join(_TRAINERS)
            raise ConfigError(f"{self.path} must make one trainer of {known}, got {len(calls)}")
        call = calls[0]
        trainer = _TRAINERS[_name(call.func)]
        given: dict[str, Any] = {}
        positional = dict(zip(_POSITIONS[trainer], call.args, strict=False))
        for key, node in (*positional.items(), *((k.arg or "**", k.value) for k in call.keywords)):
            if key == "args":
                given |= self._settings(node)
            elif key in ("reward_funcs", "tools", "environment_factory", "rollout_func"):
                given[key] = self._handed(node)
            elif key in ("train_dataset", "eval_dataset") and not (self.flags or {}).get("dataset_name"):
                given[key] = self._dataset(node, trainer)
            elif key == "peft_config":
                given |= self._adapters(node)
            elif key == "model" and not (self.flags or {}).get("model_name_or_path"):
                given["model"] = self._model(node)
            elif key not in ("model", "train_dataset", "eval_dataset"):
                given[key] = self.value(node)
        files = {str(self.copy): self._copied_text()} if self.copied or self.readers else {}
        return Script(trainer, given, files)

    def _settings(self, node: ast.expr) -> dict[str, Any]:
        found = self._resolved(node)
        later = self.assigned.get(node.id, {}) if isinstance(node, ast.Name) else {}
        own = {key: self.value(value) for key, value in later.items()}
        if not isinstance(found, ast.Call) and self.flags is not None:
            return {**self.flags, **{key: value for key, value in own.items() if not isinstance(value, Unread)}}
        if not isinstance(found, ast.Call):
            raise ConfigError(
                f"{self.path}:{node.lineno}: the trainer's args must be a config that the script makes, got "
                f"{ast.unparse(node)}; a script that parses its arguments is imported from its command line: "
                'kitae import trl "script.py --learning_rate 1e-5 …"'
            )
        made = {key.arg or "**": self.value(key.value) for key in found.keywords}
        if found.args:
            made["output_dir"] = self.value(found.args[0])
        return made | own | dict(self.flags or {})

    def _adapters(self, node: ast.expr) -> dict[str, Any]:
        found = self._resolved(node)
        if not isinstance(found, ast.Call) or not _name(found.func).endswith("Config"):
            return {} if self.flags is not None or self.value(node) is None else {"use_peft": Unread(ast.unparse(node))}
        names = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
        given = {names.get(str(k.arg), str(k.arg)): self.value(k.value) for k in found.keywords}
        return {"use_peft": True, "lora_r": 8, "lora_alpha": 8} | {k: v for k, v in given.items() if k != "task_type"}

    def _model(self, node: ast.expr) -> Any:
        """A name, also that which a model is loaded from."""
        found = self._resolved(node)
        if isinstance(found, ast.Call) and _name(found.func) == "from_pretrained" and found.args:
            return self.value(found.args[0])
        return self.value(node)

    # Values.

    def _resolved(self, node: ast.expr) -> ast.expr:
        """What a name is bound to above the line."""
        seen = 0
        while isinstance(node, ast.Name) and seen < 20:
            above = [value for line, value in self.bound.get(node.id, ()) if line < node.lineno]
            if not above:
                break
            node, seen = above[-1], seen + 1
        return node

    def value(self, node: ast.expr) -> Any:
        """A literal, or `Unread`."""
        node = self._resolved(node)
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple():
                return [self.value(item) for item in node.elts]
            case ast.Dict() if all(key is not None for key in node.keys):
                pairs = zip(node.keys, node.values, strict=True)
                return {str(self.value(k)): self.value(v) for k, v in pairs if k is not None}
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return name
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (
                owner.endswith("args") and self.flags is not None
            ):
                return self.flags.get(name)
            case ast.BoolOp(op=ast.Or()):
                return next((x for side in node.values if (x := self.value(side))), None)
            case ast.IfExp() if not isinstance(test := self.value(node.test), Unread):
                return self.value(node.body if test else node.orelse)
        try:
            return ast.literal_eval(_folded(node))
        except (ValueError, TypeError, SyntaxError, ZeroDivisionError):
            return Unread(ast.unparse(node))

    def _handed(self, node: ast.expr) -> Any:
        """Functions: one, or a list of them."""
        found = self._resolved(node)
        if isinstance(found, ast.List | ast.Tuple):
            return [self._function(item) for item in found.elts]
        return [self._function(node)]

    def _function(self, node: ast.expr) -> Any:
        found = self._resolved(node)
        name = _name(found.func) if isinstance(found, ast.Call) else _name(found)
        if isinstance(found, ast.Constant):
            return found.value
        if isinstance(found, ast.Name) and name in self.functions:
            return Reward(name, place=self._place(name), wants=_parameters(self.functions[name]))
        package, original = self.imported.get(name, ("", ""))
        if package.startswith("trl"):
            arguments = self._arguments(found) if isinstance(found, ast.Call) else {}
            return Reward(original, package, arguments=arguments)
        local = self.path.parent / f"{package.replace('.', '/')}.py"
        if package and isinstance(found, ast.Name) and local.is_file():
            return Reward(original, place=f"{local}:{original}")
        return Unread(ast.unparse(node))

    def _arguments(self, call: ast.Call) -> dict[str, Any]:
        return {str(k.arg): self.value(k.value) for k in call.keywords}

    # Data.

    def _dataset(self, node: ast.expr, trainer: str) -> Any:
        """`load_dataset(…)`, with what is done to its rows."""
        changes: list[str] = []
        maps: list[str] = []
        split = ""
        found = self._resolved(node)
        while not (isinstance(found, ast.Call) and _name(found.func) in ("load_dataset", "from_json", "from_parquet")):
            if isinstance(found, ast.Subscript):
                place = self.value(found.slice)
                split, found = str(place) if isinstance(place, str) else f"#{place}", self._resolved(found.value)
            elif isinstance(found, ast.Call) and isinstance(found.func, ast.Attribute):
                if (name := found.func.attr) == "map" and (function := self._mapped(found)):
                    maps.append(function)
                elif name not in _HARMLESS:
                    changes.append(f".{name}({', '.join(ast.unparse(arg) for arg in found.args)})")
                found = self._resolved(found.func.value)
            else:
                return Unread(ast.unparse(node))
        reader = self._reader(maps[::-1], trainer) if maps else ""
        return self._loaded(found, split, tuple(changes[::-1]), reader)

    def _loaded(self, call: ast.Call, split: str, changes: tuple[str, ...], reader: str) -> Any:
        named = {str(k.arg): self.value(k.value) for k in call.keywords}
        args = [self.value(arg) for arg in call.args]
        path = args[0] if args else named.get("path")
        config = args[1] if len(args) > 1 else named.get("name")
        files = named.get("data_files") if _name(call.func) == "load_dataset" else path
        if isinstance(files, Mapping):
            files = files.get("train")
        if isinstance(files, list) and len(files) == 1:
            files = files[0]
        name = files or path
        if not isinstance(name, str) or isinstance(config, Unread):
            return Unread(ast.unparse(call))
        wanted = named.get("split") or "train"
        if split.startswith("#") and isinstance(wanted, list):
            wanted = wanted[int(split[1:])]
        elif split and not split.startswith("#"):
            wanted = split
        return DataSource(name, str(config or ""), str(wanted), changes, reader)

    def _mapped(self, call: ast.Call) -> str:
        """The name of the function that `map` is given, if a row goes in and its columns come out."""
        named = {k.arg: k.value for k in call.keywords}
        function = call.args[0] if call.args else named.get("function")
        if "batched" in named or "fn_kwargs" in named or not isinstance(function, ast.Name | ast.Lambda):
            return ""
        if isinstance(function, ast.Lambda):
            return f"({ast.unparse(function)})"
        return function.id if function.id in self.functions else ""

    def _reader(self, maps: list[str], trainer: str) -> str:
        """A function that does to one row what the maps do, in the file of copied functions."""
        for function in maps:
            if not function.startswith("("):
                self.copied.append(function)
        lines = [
            "def read_row(row):",
            '    """A row of the data set, as the script makes it."""',
            "    row = dict(row)",
        ]
        lines += [f"    row.update({function}(row))" for function in maps]
        if trainer in ("grpo", "rloo"):
            keys = '("solution", "answer", "ground_truth", "label")'
            lines.append(f'    reference = next((row[key] for key in {keys} if key in row), "")')
            lines.append('    return {"question": row["prompt"], "reference": reference, "context": row}')
        else:
            lines.append("    return row")
        self.readers = ["\n".join(lines)]
        return f"{self.copy}:read_row"

    # Copies.

    def _place(self, name: str) -> str:
        if name in self.importable and not self.works:
            return f"{self.path}:{name}"
        if name not in self.copied:
            self.copied.append(name)
        return f"{self.copy}:{name}"

    def _copied_text(self) -> str:
        """The functions with all of the script's top level that they name, in its order."""
        top, readers = self._top(), "\n".join(self.readers)
        todo = [*self.copied, *_names(ast.parse(readers))]
        wanted: set[int] = set()
        while todo:
            for node in top.get(todo.pop(), ()):
                if id(node) not in wanted:
                    wanted.add(id(node))
                    todo += _names(node)
        lines = self.path.read_text("utf-8").splitlines()
        chosen = [node for node in self.level if id(node) in wanted]
        parts = [textwrap.dedent("\n".join(lines[_first(node) - 1 : node.end_lineno])) for node in chosen]
        head = f"# Functions of {self.path.name}, which trains when it is imported: copied by kitae import."
        return "\n\n".join([head, *parts, *self.readers]) + "\n"

    def _top(self) -> dict[str, list[ast.stmt]]:
        """The statements of the top level by the names that they bind."""
        found: dict[str, list[ast.stmt]] = {}
        for node in self.level:
            for name in _binds(node):
                found.setdefault(name, []).append(node)
        return found


def _level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is executed, those in its ifs, withs and tries too."""
    for node in body:
        if isinstance(node, ast.If | ast.With | ast.Try):
            inner = [*node.body, *getattr(node, "orelse", ())]
            yield from _level(inner)
        else:
            yield node


def _first(node: ast.stmt) -> int:
    """Its first line, decorators included."""
    return min([node.lineno, *(int(d.lineno) for d in getattr(node, "decorator_list", ()))])


def _binds(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, _Functions | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign):
        yield from (name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _parameters(node: ast.stmt) -> tuple[str, ...]:
    if not isinstance(node, _Functions):
        return ()
    return tuple(a.arg for a in (*node.args.args, *node.args.kwonlyargs))


def _name(node: ast.expr) -> str:
    """`"GRPOConfig"` of trl.GRPOConfig."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def _folded(node: ast.expr) -> ast.expr:
    """Sums and products of numbers as their value."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = (ast.literal_eval(_folded(side)) for side in (node.left, node.right))
        if all(isinstance(side, int | float) for side in (left, right)):
            return ast.Constant(_OPERATIONS[type(node.op)](left, right))
    return node
