"""Statements that are compiled once and written many times a second, past SQLAlchemy's handling of each parameter.

The SQL is SQLAlchemy's own, for the database at hand; what is saved is about ten microseconds a row.
"""

from collections.abc import Iterable, Sequence

from sqlalchemy import Executable
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import CompilerElement


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

    async def execute(self, tx: AsyncConnection, rows: Iterable[Sequence[object]]) -> None:
        """Write all these rows, each in the order of `columns`."""
        order = self._order
        if values := [tuple(row[i] for i in order) for row in rows]:
            await tx.exec_driver_sql(self._sql, values)
