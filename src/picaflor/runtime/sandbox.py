"""The room in which a model's template runs: what it may call, how much it may build, how long it may take.

Knows Jinja; must not know chats, files or tokenizers. A template is untrusted. Whatever it computes goes through a
`Guard`: values are weighed in bytes as trees, what was made is added up, lines are counted and the clock is looked at.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from types import FrameType, MethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg

MAX_VALUE_BYTES = 1 << 24
MAX_TOTAL_BYTES = 1 << 27
MAX_DEPTH = 100
MAX_INT_BITS = 4096
MAX_LOOP_STEPS = 1_000_000
MAX_LINES = 2_000_000
MAX_SECONDS = 5.0
MAX_JSON_INDENT = 16
NODE_BYTES = 64
"""What a list, a dictionary or an item of one counts, without its text."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILTERS = _words(
    "abs attr capitalize count d default dictsort e escape first float indent int items join last length list lower "
    "map max min reject rejectattr replace reverse round safe select selectattr sort string title tojson trim "
    "unique upper"
)
_ITERATING = _words("join list map max min reject rejectattr select selectattr sort title unique")
_TEXT_METHODS = _words(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
    "isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace "
    "rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
)
_METHODS: dict[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("index", "count")),
    tuple: frozenset(("index", "count")),
}
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_DATE_PATTERN = re.compile(r"(?:[^%]|%[-_0^#]?[A-Za-z]|%%){0,256}")


class TooLong(SecurityError):
    """The template was stopped because of its time."""


class Guard:
    """The bounds of one rendering. Raises SecurityError where one is passed, TooLong where it is the time."""

    def __init__(self) -> None:
        self._lines = 0
        self._steps = 0
        self._spent = 0
        self._end = time.monotonic() + MAX_SECONDS
        # Containers by identity; they are kept, so that an identity is never given to another one.
        self._known: dict[int, tuple[object, int, int]] = {}

    def tick(self) -> None:
        """Count one line or operation."""
        self._lines += 1
        if self._lines > MAX_LINES or time.monotonic() > self._end:
            raise TooLong(f"takes too long: more than {MAX_LINES} lines or {MAX_SECONDS:g} s")

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        """For sys.settrace: every line of Python that runs below the template counts."""
        self.tick()
        return None if frame.f_code.co_filename == __file__ else self.trace

    def range(self, *bounds: int) -> range:
        """Python's range; all ranges of a rendering together have a bounded length."""
        steps = range(*bounds)
        if len(steps) > MAX_LOOP_STEPS - self._steps:
            raise SecurityError(f"more than {MAX_LOOP_STEPS} loop steps")
        self._steps += len(steps)
        return steps

    def fits(self, nbytes: int) -> None:
        """Refuse a value of this size before it is made."""
        if nbytes > MAX_VALUE_BYTES:
            raise SecurityError(f"a value of {nbytes} bytes; at most {MAX_VALUE_BYTES}")

    def spend(self, nbytes: int) -> None:
        """Add to what was made so far."""
        self._spent += nbytes
        if self._spent > MAX_TOTAL_BYTES:
            raise SecurityError(f"makes more than {MAX_TOTAL_BYTES} bytes of values")

    def weigh(self, value: object, *, given: bool = False) -> tuple[int, int]:
        """(bytes of a value as a tree, its depth). What is `given` from outside costs nothing and may be large."""
        if isinstance(value, str):
            return NODE_BYTES + len(value) * (1 if value.isascii() else 4), 0
        if not isinstance(value, dict | list | tuple):
            return NODE_BYTES, 0
        known = self._known.get(id(value))
        if known is not None:
            return known[1], known[2]
        size, depth = NODE_BYTES, 0
        parts = (part for pair in value.items() for part in pair) if isinstance(value, dict) else iter(value)
        for part in parts:
            nbytes, level = self.weigh(part, given=given)
            size += NODE_BYTES + nbytes
            depth = max(depth, level + 1)
        if not given:
            self.spend(NODE_BYTES * (1 + len(value)))
        self._known[id(value)] = (value, size, depth)
        return size, depth

    def produced(self, value: Any, *, fresh: bool = False) -> Any:
        """The value, weighed. `fresh`: the texts inside are new too."""
        self.tick()
        size, depth = self.weigh(value)
        self.fits(size)
        if depth > MAX_DEPTH:
            raise SecurityError(f"a value of {depth} levels; at most {MAX_DEPTH}")
        if fresh or isinstance(value, str):
            self.spend(size)
        return value

    def text(self, value: object) -> str:
        """A value as text."""
        if isinstance(value, str):
            return value
        self.fits(self.weigh(value)[0])
        return str(self.produced(str(value)))

    def joined(self, parts: Iterable[object], between: str = "") -> str:
        """The texts of all parts in a row."""
        texts: list[str] = []
        size, gap = 0, self.weigh(between)[0] - NODE_BYTES
        for part in parts:
            self.tick()
            texts.append(self.text(part))
            size += self.weigh(texts[-1])[0] - NODE_BYTES + gap
            self.fits(size)
        return str(self.produced(between.join(texts)))

    def collected(self, parts: Iterable[Any]) -> list[Any]:
        """All parts as a list."""
        found: list[Any] = []
        for part in parts:
            self.tick()
            found.append(part)
            self.fits(2 * NODE_BYTES * len(found))
        return found


_GUARD: ContextVar[Guard] = ContextVar("guard of the rendering")


@contextmanager
def guarded() -> Iterator[Guard]:
    """A guard for what is rendered inside; a trace function that was set before is set again."""
    guard = Guard()
    token = _GUARD.set(guard)
    before = sys.gettrace()
    sys.settrace(guard.trace)
    try:
        yield guard
    finally:
        sys.settrace(before)
        _GUARD.reset(token)


class _Namespace(Namespace):
    """Jinja's namespace; as text it does not show its values, which may hold each other."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what a model writes; here it is the text alone."""

    tags = {"generation"}  # noqa: RUF012 (the name and form that Jinja asks for)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Code(CodeGenerator):
    """Jinja's compiler; what makes a value without a call goes through the guard."""

    def _wrapped(self, name: str, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{name}(")
        visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`."""
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """`[a, b]`."""
        self._wrapped("produced", super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """`(a, b)`, unless it is what a value is assigned to."""
        if node.ctx == "load":
            self._wrapped("produced", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """`{a: b}`."""
        self._wrapped("produced", super().visit_Dict, node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """`a in b`: nothing new, but it takes time."""
        self._wrapped("produced", super().visit_Compare, node, frame)

    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:
        """`a is in b`: as a comparison."""
        self._wrapped("produced", super().visit_Test, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """`a[1:2]` is a new value, `a[1]` is not."""
        if isinstance(node.arg, nodes.Slice):
            self._wrapped("produced", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def signature(self, node: Any, frame: Frame, extra_kwargs: Any = None) -> None:
        """The arguments of a call; `*values` would be spread out before anybody could count them."""
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            self.fail("*arguments and **arguments are not available in a chat template", node.lineno)
        super().signature(node, frame, extra_kwargs)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox within the bounds of the guard; filters, methods and functions are those of positive lists."""

    intercepted_binops = frozenset(["+", "-", "*", "**", "%", "/", "//"])
    code_generator_class = _Code

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,
            finalize=_finalize,
        )
        self._functions: tuple[object, ...] = (_raise_exception, _strftime_now, dict, _Namespace)
        self.globals = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": dict,
            "namespace": _Namespace,
        }
        own = {"tojson": _to_json, "join": _join}
        found = {name: own.get(name, filter_) for name, filter_ in self.filters.items() if name in _FILTERS}
        self.filters = {name: _filter(name, filter_) for name, filter_ in {**found, **own}.items()}

    def concat(self, parts: Iterable[object]) -> str:
        """Texts in a row: `~`, and what macros and blocks wrote."""
        return _GUARD.get().joined(parts)

    def produced(self, value: Any) -> Any:
        """A value that the compiled template has just made."""
        return _GUARD.get().produced(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` if the result stays small."""
        guard = _GUARD.get()
        guard.tick()
        if operator == "%" and isinstance(left, str):
            raise SecurityError("text formatting with % is not available in a chat template")
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if operator == "**":
                bits = abs(right) * left.bit_length()
            if bits > MAX_INT_BITS:
                raise SecurityError(f"an integer of {bits} bits; at most {MAX_INT_BITS}")
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            count, items = (left, right) if isinstance(left, int) else (right, left)
            guard.fits(count * (guard.weigh(items)[0] - NODE_BYTES) if hasattr(items, "__len__") else 0)
        elif operator == "+" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
            guard.fits(guard.weigh(left)[0] + guard.weigh(right)[0])
        return guard.produced(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what a template may call."""
        guard = _GUARD.get()
        guard.tick()
        owner = getattr(__obj, "__self__", None)
        allowed = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), None)
        if allowed is not None:
            name = str(__obj.__name__)
            if name not in allowed:
                raise SecurityError(f"{type(owner).__name__}.{name} is not available in a chat template")
            named = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
            return _method(guard, owner, name, __obj, args, named)
        if not (
            isinstance(__obj, Macro | LoopContext | BlockReference | Undefined)
            or (isinstance(__obj, MethodType) and isinstance(owner, Guard | LoopContext))
            or any(__obj is function for function in __self._functions)
        ):
            raise SecurityError(f"calling {_name(__obj)} is not available in a chat template")
        if __obj is _Namespace or __obj is dict:
            guard.spend(sum(NODE_BYTES * (1 + len(part)) for part in (*args, kwargs) if hasattr(part, "__len__")))
        return guard.produced(super().call(__context, __obj, *args, **kwargs))


def _name(value: object) -> str:
    return str(getattr(value, "__name__", type(value).__name__))[:80]


def _method(guard: Guard, owner: Any, name: str, method: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call a method of a text or a container."""
    if isinstance(owner, str):
        if name == "join":
            return guard.joined(args[0] if args else (), owner)
        if name == "replace":
            _fits_replace(guard, owner, *args, **named)
        if name in ("split", "rsplit"):
            _fits_split(guard, owner, *args, **named)
        if name == "splitlines":
            guard.fits(2 * NODE_BYTES * sum(owner.count(mark) for mark in _LINE_ENDS))
        return guard.produced(method(*args, **named), fresh=True)
    result = method(*args, **named)
    return guard.produced(list(result) if name in ("items", "keys", "values") else result)


def _fits_split(guard: Guard, text: str, sep: str | None = None, maxsplit: int = -1) -> None:
    most = MAX_VALUE_BYTES // (2 * NODE_BYTES)
    if sep is None:
        parts = len(text.split(None, most + 1)) if len(text) > most else 0
    else:
        parts = text.count(sep) if sep else 0
    guard.fits(2 * NODE_BYTES * (parts if maxsplit < 0 else min(parts, maxsplit)))


def _fits_replace(guard: Guard, text: Any, old: Any, new: Any, count: int | None = -1) -> None:
    whole, gone, come = guard.text(text), guard.text(old), guard.text(new)
    times = whole.count(gone) if gone else len(whole) + 1
    if count is not None and count >= 0:
        times = min(times, count)
    guard.fits(guard.weigh(whole)[0] + times * 4 * len(come))


def _fits_indent(guard: Guard, text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    whole = guard.text(text)
    lines = 1 + sum(whole.count(mark) for mark in _LINE_ENDS)
    guard.fits(guard.weigh(whole)[0] + lines * (2 * NODE_BYTES + 4 * (width if isinstance(width, int) else len(width))))


def _fits_round(guard: Guard, number: Any, precision: int = 0, method: str = "common") -> None:
    if abs(precision) > 15:
        raise SecurityError(f"a number rounded to {precision} places; at most 15")


_BOUNDS: dict[str, Callable[..., None]] = {
    "replace": _fits_replace,
    "indent": _fits_indent,
    "round": _fits_round,
}


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the bounds. With a context, so that Jinja never runs it while it compiles."""
    passed = _PassArg.from_obj(function)
    check = _BOUNDS.get(name)

    @pass_context
    def bounded(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        guard = _GUARD.get()
        guard.tick()
        if check is not None:
            check(guard, value, *args, **kwargs)
        if name in _ITERATING and isinstance(value, str):
            guard.fits(2 * NODE_BYTES * len(value))
        given = (
            {
                _PassArg.context: (context,),
                _PassArg.eval_context: (context.eval_ctx,),
                _PassArg.environment: (context.environment,),
            }.get(passed, ())
            if passed is not None
            else ()
        )
        result = function(*given, value, *args, **kwargs)
        if isinstance(result, Iterator):
            parts = guard.collected(result)
            guard.produced(parts)
            return iter(parts)
        return guard.produced(result, fresh=isinstance(value, str))

    return bounded


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """What is written out, as text. With a context, so that Jinja never runs it while it compiles."""
    return _GUARD.get().text(value)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    parts = value if attribute is None else map(make_attrgetter(context.environment, attribute), value)
    return _GUARD.get().joined(parts, _GUARD.get().text(d))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and (not isinstance(indent, int) or not 0 <= indent <= MAX_JSON_INDENT):
        raise SecurityError(f"tojson(indent={str(indent)[:20]}); accepted: 0 to {MAX_JSON_INDENT}")
    guard = _GUARD.get()
    guard.fits(guard.weigh(value)[0])
    if guard.weigh(value)[1] > MAX_DEPTH:
        raise SecurityError(f"a value of more than {MAX_DEPTH} levels")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, check_circular=False
    )
    return guard.joined(encoder.iterencode(value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if not _DATE_PATTERN.fullmatch(pattern):
        raise SecurityError(f"strftime_now({pattern[:40]!r}); accepted: at most 256 letters and % codes without widths")
    return datetime.now().strftime(pattern)
