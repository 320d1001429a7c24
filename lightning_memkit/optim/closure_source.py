"""Proves from a step's source that it evaluates its closure once, before anything else, as torch's optimizers do.

The proof is conservative: whatever is not recognized counts as unproven.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

# Decorators of these modules pass the closure on unchanged.
_TRUSTED_WRAPPERS = ("torch.", "lightning_memkit.")
# Calls that only read their arguments; a step may make them before it evaluates the closure.
_ASKING = frozenset(
    "len isinstance getattr hasattr any all bool type sum min max list tuple dict set sorted zip range enumerate "
    "float int str id repr print".split()
)
_ASKING_METHODS = frozenset(
    "numel norm size dim item get keys values items tolist parameters modules".split()
)
# Calls that only record something (in a list or a log), which may also come first.
_NOTING_METHODS = frozenset("append add extend debug info warn warning".split())
_HEALTH_CHECKS = frozenset({"_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"})


class _Unproven(Exception):
    """The source uses the closure in a way that torch's convention does not."""


@lru_cache(maxsize=256)
def is_conventional(function: Any, owner: type | None) -> bool:
    """Whether a step keeps torch's convention; False if its source is unavailable or does not prove it.

    Args:
        function: the step.
        owner: the class whose step it is, needed to follow ``super().step(closure)``; None for a plain
            function.
    """
    inner = _unwrapped(function)
    if inner is None:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inner)))
    except (OSError, TypeError, SyntaxError):
        return False
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or definition.name != inner.__name__:
        return False
    try:
        reading = _ClosureReading(definition, owner, inner)
        reading.statements(definition.body)
    except _Unproven:
        return False
    return True


def _unwrapped(function: Any) -> Any:
    """The function beneath decorators known to pass the closure on; None if one of them is unknown."""
    while True:
        function = getattr(function, "__func__", function)
        if not inspect.isfunction(function):
            return None
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return function
        if not f"{function.__globals__.get('__name__')}.".startswith(_TRUSTED_WRAPPERS):
            return None
        function = inner


class _ClosureReading:
    """Reads a step's statements in order and raises `_Unproven` where they leave the convention."""

    def __init__(self, definition: ast.FunctionDef, owner: type | None, function: Any) -> None:
        self._owner = owner
        self._function = function
        self._calls = 0
        self._acted = False  # whether something may have changed before the closure is evaluated
        arguments = definition.args
        if arguments.vararg or arguments.kwarg:
            raise _Unproven
        named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        keywords = [argument.arg for argument in arguments.kwonlyargs]
        self._arguments = frozenset((*named[1:], *keywords))
        self._name = "closure" if "closure" in (*named, *keywords) else (named[1:2] or [""])[0]

    def statements(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if not self._uses(statement):
                self._acted = self._acted or not _is_harmless(statement)
            elif isinstance(statement, ast.If) and not _calls_in(statement.test, self._name):
                self._test(statement.test)
                self.statements(statement.body)
                self.statements(statement.orelse)
            elif isinstance(statement, ast.With):
                if any(self._uses(item) for item in statement.items):
                    raise _Unproven
                self.statements(statement.body)
            elif isinstance(statement, ast.Assert):
                self._test(statement.test)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)):
                self._expression(statement)
            else:
                raise _Unproven

    def _test(self, test: ast.expr) -> None:
        """Accept a condition that only asks whether a closure, or another argument, was given."""
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        if not all(self._asks_for_the_closure(part) or self._asks_for_an_argument(part) for part in parts):
            raise _Unproven  # the closure is evaluated under some other condition

    def _asks_for_the_closure(self, test: ast.expr) -> bool:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test = test.operand
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Name):  # a helper: `exists(closure)`
            given = [each.id for each in test.args if isinstance(each, ast.Name)]
            alone = given == [self._name] and len(test.args) == 1 and not test.keywords
            return alone and _tells_none(self._function.__globals__.get(test.func.id), test.func.id)
        if isinstance(test, ast.Compare):
            return _is_none_test(test) and isinstance(test.left, ast.Name) and test.left.id == self._name
        return isinstance(test, ast.Name) and test.id == self._name

    def _asks_for_an_argument(self, test: ast.expr) -> bool:
        """Whether the condition asks for another argument of the step; callers with a closure give no other."""
        named = isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and _is_none_test(test)
        return named and test.left.id in self._arguments  # pyright: ignore[reportAttributeAccessIssue]

    def _expression(self, statement: ast.stmt) -> None:
        allowed: set[int] = set()
        for node in ast.walk(statement):
            if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                raise _Unproven
            if isinstance(node, ast.IfExp) and self._uses(node):
                self._test(node.test)
                allowed.update(id(name) for name in ast.walk(node.test))
            if isinstance(node, ast.Call) and _is_call_of(node, self._name):
                allowed.add(id(node.func))
                self._evaluated()
            if isinstance(node, ast.Call) and (handed := self._handed_to_super(node)) is not None:
                allowed.add(id(handed))
                self._evaluated()
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id == self._name and id(node) not in allowed:
                raise _Unproven

    def _evaluated(self) -> None:
        self._calls += 1
        if self._acted or self._calls > 1:
            raise _Unproven

    def _handed_to_super(self, call: ast.Call) -> ast.expr | None:
        """The closure in ``super().step(closure)``, if that inherited step keeps the convention."""
        function = call.func
        if not (isinstance(function, ast.Attribute) and function.attr == "step"):
            return None
        above = function.value
        if not (
            isinstance(above, ast.Call) and isinstance(above.func, ast.Name) and above.func.id == "super"
        ):
            return None
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if len(given) != 1 or not isinstance(given[0], ast.Name) or self._owner is None or above.args:
            return None
        order = self._owner.__mro__
        places = [
            place
            for place, each in enumerate(order)
            if _unwrapped(vars(each).get("step")) is self._function and "step" in vars(each)
        ]
        above_it = order[places[0] + 1 :] if places else ()
        inherited = next((vars(each)["step"] for each in above_it if "step" in vars(each)), None)
        if inherited is None or not is_conventional(inherited, self._owner):
            return None
        return given[0]

    def _uses(self, node: ast.AST) -> bool:
        return any(isinstance(each, ast.Name) and each.id == self._name for each in ast.walk(node))


def _is_call_of(node: ast.Call, name: str) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == name and not node.args and not node.keywords


def _is_none_test(test: ast.Compare) -> bool:
    against = test.comparators[0]
    none = isinstance(against, ast.Constant) and against.value is None
    return len(test.ops) == 1 and none and isinstance(test.ops[0], (ast.Is, ast.IsNot))


def _tells_none(helper: Any, name: str) -> bool:
    """Whether a helper does nothing but tell None from a closure."""
    if name in ("callable", "bool"):
        return helper is None
    code = getattr(helper, "__code__", None)
    if code is None or code.co_names or code.co_argcount != 1:  # it reads no globals and one argument only
        return False
    return helper(None) is False and helper(lambda: None) is True


def _calls_in(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Call) and _is_call_of(each, name) for each in ast.walk(node))


def _only_asks(expression: ast.AST) -> bool:
    """Whether an expression changes nothing: it calls only functions that read."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Call):
            function = node.func
            asks = isinstance(function, ast.Name) and function.id in _ASKING
            if not (asks or (isinstance(function, ast.Attribute) and function.attr in _ASKING_METHODS)):
                return False
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            return False
    return True


def _is_harmless(statement: ast.stmt) -> bool:
    """Whether a statement before the closure could equally come after it."""
    if isinstance(statement, (ast.Pass, ast.Import, ast.ImportFrom, ast.Raise)):
        return True
    if isinstance(statement, ast.Assert):
        return _only_asks(statement.test)
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        noted = all(_is_note(each) for target in targets for each in _targets(target))
        return noted and (statement.value is None or _only_asks(statement.value))
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) or _only_notes(statement.value)
    if isinstance(statement, ast.If):
        return _only_asks(statement.test) and all(map(_is_harmless, [*statement.body, *statement.orelse]))
    return False


def _only_notes(expression: ast.expr) -> bool:
    """Whether a call only checks something, or records something in a list or a log."""
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Attribute):
        return isinstance(expression, ast.Call) and _only_asks(expression)
    given = [*expression.args, *(keyword.value for keyword in expression.keywords)]
    if expression.func.attr in _HEALTH_CHECKS:
        return not given
    # A tensor's `add` returns a new tensor, which is discarded here; the methods that change it end in "_".
    return expression.func.attr in _NOTING_METHODS and all(map(_only_asks, given))


def _is_note(target: ast.expr) -> bool:
    """Whether an assignment is to a local name or to an attribute of the optimizer itself."""
    own = (
        isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    )
    return own or isinstance(target, ast.Name)


def _targets(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        yield from target.elts
    else:
        yield target
