"""a client may say itself why it does not come to a run"""

import sqlalchemy as sa
from alembic import op

revision: str = "5"
down_revision: str | None = "4"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    # The default is for rows of before, and for replicas that still run the version of before.
    op.add_column("turned_away", sa.Column("kind", sa.String(16), nullable=False, server_default="turned away"))
