"""The mutants of a source file: mutmut's operators, and four that take away a decision.

Left out are mutmut's operators whose mutants nearly always end in a TypeError (an argument or a value becomes None).
Any test that runs the line notices those, so they say nothing about what the tests decide.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import libcst as cst
import libcst.matchers as m
from libcst.metadata import CodeRange, MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation import mutators

Line = NewType("Line", int)
Operator = Callable[[Any], Iterable[cst.CSTNode]]

# Annotations, imports, docstrings: the program does not act by them. Decorators of commands are documentation.
_SKIPPED = (cst.Annotation, cst.Import, cst.ImportFrom, cst.Decorator)


@dataclass(frozen=True)
class Place:
    """One mutation of a file that can be made."""

    first: Line  # of the statement that holds it, or of a compound statement's head
    last: Line
    node: cst.CSTNode
    replacement: cst.CSTNode


@dataclass(frozen=True)
class Source:
    """A parsed file and every place where it can be mutated."""

    module: cst.Module
    places: Sequence[Place]

    def mutated(self, place: Place) -> str:
        changed = self.module.deep_replace(place.node, place.replacement)
        assert isinstance(changed, cst.Module)
        return changed.code

    def difference(self, place: Place) -> str:
        """The changed lines, as `diff` writes them."""
        before, after = self.module.code.splitlines(), self.mutated(place).splitlines()
        lines = difflib.unified_diff(before, after, lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def source_of(code: str) -> Source:
    wrapper = MetadataWrapper(cst.parse_module(code))
    collector = _Collector()
    wrapper.visit(collector)
    kept = [place for place in collector.places if not place.node.deep_equals(place.replacement)]
    return Source(wrapper.module, kept)


def _never_or_always(node: cst.If) -> Iterator[cst.If]:
    """A condition that decides nothing; a refusal is such a condition."""
    for decision in ("False", "True"):
        if not m.matches(node.test, m.Name(decision)):
            yield node.with_changes(test=cst.Name(decision), whitespace_before_test=cst.SimpleWhitespace(" "))


def _no_filter(node: cst.CompIf) -> Iterator[cst.CompIf]:
    yield node.with_changes(test=cst.Name("True"))


def _without_call(node: cst.Expr) -> Iterator[cst.Pass]:
    """A call made for what it does is forgotten."""
    if m.matches(node.value, m.Call() | m.Await()):
        yield cst.Pass()


def _without_context(node: cst.With) -> Iterator[cst.If]:
    """A lock, a transaction or a time limit around a block is gone."""
    if all(item.asname is None for item in node.items):
        yield cst.If(test=cst.Name("True"), body=node.body, leading_lines=node.leading_lines)


def _without_keyword(node: cst.Call) -> Iterator[cst.Call]:
    """A named argument is forgotten, and its default holds."""
    for index, argument in enumerate(node.args):
        if argument.keyword is not None:
            yield node.with_changes(args=[*node.args[:index], *node.args[index + 1 :]])


def _string(node: cst.SimpleString) -> Iterator[cst.CSTNode]:
    """Another key or name; what has spaces is said to people, and its wording is nobody's contract."""
    if " " not in node.value:
        yield from list(mutators.operator_string(node))[:1]


_OPERATORS: Sequence[tuple[Any, Operator]] = [  # by the class of the node
    (cst.BaseNumber, mutators.operator_number),
    (cst.Name, mutators.operator_name),
    (cst.AugAssign, mutators.operator_augmented_assignment),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.Call, mutators.operator_symmetric_string_methods_swap),
    (cst.Call, mutators.operator_unsymmetrical_string_methods_swap),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.CSTNode, mutators.operator_swap_op),
    (cst.Match, mutators.operator_match),
    (cst.IfExp, mutators.operator_if_exp),
    (cst.If, _never_or_always),
    (cst.CompIf, _no_filter),
    (cst.Expr, _without_call),
    (cst.With, _without_context),
    (cst.Call, _without_keyword),
    (cst.SimpleString, _string),
]


class _Collector(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Place] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _SKIPPED) or _is_for_type_checkers(node):
            return False
        for kind, operator in _OPERATORS:
            if isinstance(node, kind):
                self.places += [self._place(node, replacement) for replacement in operator(node)]
        return True

    def _place(self, node: cst.CSTNode, replacement: cst.CSTNode) -> Place:
        """Mutated lines are those of the whole statement: the interpreter says that it runs one of them."""
        statement = node
        while not isinstance(statement, cst.SimpleStatementLine | cst.BaseCompoundStatement | cst.Module):
            parent = self.get_metadata(ParentNodeProvider, statement)
            assert isinstance(parent, cst.CSTNode)
            statement = parent
        span = self._span(statement)
        first, last = span.start.line, span.end.line
        inner = statement.cases[0] if isinstance(statement, cst.Match) else getattr(statement, "body", None)
        if isinstance(inner, cst.IndentedBlock | cst.MatchCase):
            last = max(first, self._span(inner).start.line - 1)
        return Place(Line(first), Line(last), node, replacement)

    def _span(self, node: cst.CSTNode) -> CodeRange:
        span = self.get_metadata(PositionProvider, node)
        assert isinstance(span, CodeRange)
        return span


def _is_for_type_checkers(node: cst.CSTNode) -> bool:
    return m.matches(node, m.If(test=m.Name("TYPE_CHECKING")))
