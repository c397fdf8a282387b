"""member lists"""

import sqlalchemy as sa
from alembic import op

revision: str = "2"
down_revision: str | None = "1"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "member_lists",
        sa.Column("run", sa.String(length=63), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"],
            ["runs.name"],
        ),
        sa.PrimaryKeyConstraint("run"),
    )
