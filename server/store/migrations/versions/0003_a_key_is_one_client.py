"""a key is one client: of those that may speak, no two have the same"""

import sqlalchemy as sa
from alembic import op

from umbel.server.store.database import UnfitDatabase

revision: str = "3"
down_revision: str | None = "2"
branch_labels: str | None = None
depends_on: str | None = None

MAY_SPEAK = "revoked_at IS NULL"


def upgrade() -> None:
    twice = op.get_bind().execute(
        sa.text(f"SELECT min(id), max(id) FROM clients WHERE {MAY_SPEAK} GROUP BY public_key HAVING count(*) > 1")
    )
    if pairs := sorted(f"{one!r} and {other!r}" for one, other in twice):
        raise UnfitDatabase(
            f"a client key is enrolled under two names, and one key must be one client: {', '.join(pairs)}; "
            "start the previous version of umbel again, remove one name of each pair with `umbel client remove NAME`, "
            "then start this version"
        )
    may_speak = sa.text(MAY_SPEAK)
    op.create_index(
        "ix_clients_public_key",
        "clients",
        ["public_key"],
        unique=True,
        sqlite_where=may_speak,
        postgresql_where=may_speak,
    )
