"""What names stand for: imports, aliases and simple assignments, by Python's rules of scopes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef

_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_DEPTH = 8  # aliases of aliases that are followed


class Scope:
    """The names that a module, class, function, lambda or comprehension binds.

    A name's bindings are dotted names of imports, expressions that are assigned, and None for everything else.
    """

    def __init__(self, node: ast.AST, parent: Scope | None) -> None:
        self.node = node
        self.parent = parent
        self.bindings: dict[str, list[str | ast.expr | None]] = {}
        self.outer: set[str] = set()  # declared global or nonlocal

    def bind(self, name: str, value: str | ast.expr | None) -> None:
        scope: Scope = self
        while name in scope.outer and scope.parent is not None:
            scope = scope.parent
        scope.bindings.setdefault(name, []).append(value)

    def find(self, name: str) -> list[str | ast.expr | None] | None:
        """Return the bindings of a name that is used here, or None if the script does not bind it."""
        scope: Scope | None = self
        while scope is not None:
            # A class's names are not seen in its methods.
            if name in scope.bindings and (scope is self or not isinstance(scope.node, ast.ClassDef)):
                return scope.bindings[name]
            scope = scope.parent
        return None


class Names:
    """Names of a script. The whole script has to be walked by `Names(tree)` before anything is asked."""

    def __init__(self, tree: ast.Module) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self._scopes: dict[ast.AST, Scope] = {}
        self._attributes: dict[tuple[ast.ClassDef, str], list[ast.expr]] = {}
        self._enter(tree, Scope(tree, None))

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what contains a node, from the inside."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def resolve(self, node: ast.AST, depth: int = _DEPTH) -> str:
        """Return the dotted name that an expression stands for, such as `torch.cuda.amp.autocast`, or ''.

        A name that the script does not bind stands for itself: it is a builtin.
        """
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value, depth)
            return f"{base}.{node.attr}" if base else ""
        if not isinstance(node, ast.Name) or depth == 0:
            return ""
        bindings = self._bindings(node)
        if bindings is None:
            return node.id
        imports = [value for value in bindings if isinstance(value, str)]
        others = [value for value in bindings if not isinstance(value, str)]
        if imports:  # `except ImportError: amp = None` does not change what amp is when it is used
            return imports[0] if all(isinstance(value, ast.Constant) for value in others) else ""
        only = others[0] if len(others) == 1 else None
        return self.resolve(only, depth - 1) if isinstance(only, ast.Name | ast.Attribute) else ""

    def value(self, node: ast.AST) -> ast.expr | None:
        """Return the only expression that is assigned to a name or to an attribute of `self`, or None."""
        values = self.values(node)
        return values[0] if len(values) == 1 else None

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Return all expressions that are assigned to it; [] if something else binds it, too."""
        if isinstance(node, ast.Name):
            bindings = self._bindings(node) or []
            found = [value for value in bindings if isinstance(value, ast.expr)]
            return found if len(found) == len(bindings) else []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            holder = next((above for above in self.ancestors(node) if isinstance(above, ast.ClassDef)), None)
            return [] if holder is None else self._attributes.get((holder, node.attr), [])
        return []

    def made_by(self, node: ast.AST) -> str:
        """Return the dotted name of what is called to make a value, followed through one assignment, or ''."""
        value = self.value(node) or node
        return self.resolve(value.func) if isinstance(value, ast.Call) else ""

    def _bindings(self, node: ast.Name) -> list[str | ast.expr | None] | None:
        scope = self._scopes.get(node)
        return None if scope is None else scope.find(node.id)

    def _enter(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            self.parents[child] = node
            self._visit(child, scope)

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Name):
            self._scopes[node] = scope
            if not isinstance(node.ctx, ast.Load):
                scope.bind(node.id, self._assigned(node))
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            self._attribute(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node, scope)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            scope.outer.update(node.names)
        elif isinstance(node, ast.ExceptHandler | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope.bind(node.name or "", None)
        elif isinstance(node, ast.arg):
            scope.bind(node.arg, None)
        if isinstance(node, (_SCOPES, _COMPREHENSIONS)):
            self._inner(node, scope)
        else:
            self._enter(node, scope)

    def _inner(self, node: ast.AST, scope: Scope) -> None:
        inner = Scope(node, scope)
        outside = [*getattr(node, "decorator_list", []), *getattr(node, "bases", [])]
        arguments = getattr(node, "args", None)
        if arguments is not None:
            outside += [*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)]
            self.parents.update(dict.fromkeys([*arguments.defaults, *arguments.kw_defaults], arguments))
            self.parents[arguments] = node
        for child in ast.iter_child_nodes(node):
            self.parents.setdefault(child, node)
            if child is arguments:
                for argument in ast.iter_child_nodes(arguments):
                    if argument not in outside:
                        self.parents[argument] = arguments
                        self._visit(argument, inner)
            elif child not in outside:
                self._visit(child, inner)
        for child in outside:
            self._visit(child, scope)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                dotted = "." * node.level + (node.module or "")
                scope.bind(alias.asname or alias.name, f"{dotted}.{alias.name}")
            elif alias.asname:
                scope.bind(alias.asname, alias.name)
            else:
                root = alias.name.partition(".")[0]
                scope.bind(root, root)

    def _assigned(self, target: ast.AST) -> ast.expr | None:
        statement = self.parents.get(target)
        if isinstance(statement, ast.Assign) and target in statement.targets:
            return statement.value
        if isinstance(statement, ast.AnnAssign | ast.NamedExpr):
            return statement.value
        return None

    def _attribute(self, node: ast.Attribute) -> None:
        value = self._assigned(node)
        holder = next((above for above in self.ancestors(node) if isinstance(above, ast.ClassDef)), None)
        if holder is not None and isinstance(node.value, ast.Name) and node.value.id == "self":
            # What is bound in another way is no expression: then none of them is the only one.
            self._attributes.setdefault((holder, node.attr), []).append(value or ast.Constant(...))
