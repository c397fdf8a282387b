"""Statements that are compiled once and written many times a second, past SQLAlchemy's handling of each parameter.

The SQL is SQLAlchemy's own, for the database at hand; what is saved is about ten microseconds a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Executable
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import CompilerElement


@dataclass(frozen=True, slots=True)
class Write:
    """A statement in the database's own SQL, and the rows that it writes, by position."""

    sql: str
    rows: Sequence[tuple[object, ...]]


class Prepared:
    """A statement for rows of plain numbers and strings. `columns`: the names of its parameters, as a row has them."""

    def __init__(self, statement: Executable, dialect: Dialect, columns: Sequence[str]) -> None:
        assert isinstance(statement, CompilerElement)
        compiled = statement.compile(dialect=dialect, column_keys=list(columns))
        assert isinstance(compiled, SQLCompiler)
        assert compiled.positiontup is not None, "both databases' drivers take parameters by position"
        assert sorted(compiled.positiontup) == sorted(columns), "each parameter once"
        self._sql = str(compiled)
        self._order = [list(columns).index(name) for name in compiled.positiontup]

    def of(self, rows: Iterable[Sequence[object]]) -> Write:
        """The statement for these rows, each in the order of `columns`."""
        order = self._order
        if order == sorted(order):
            return Write(self._sql, [tuple(row) for row in rows])
        return Write(self._sql, [tuple(row[i] for i in order) for row in rows])

    async def execute(self, tx: AsyncConnection, rows: Iterable[Sequence[object]]) -> None:
        """Write all these rows, each in the order of `columns`."""
        if (write := self.of(rows)).rows:
            await tx.exec_driver_sql(write.sql, list(write.rows))
