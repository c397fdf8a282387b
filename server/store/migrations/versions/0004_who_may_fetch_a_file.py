"""who may fetch a file: the runs that it is of, and whom these have asked, are found without reading all rows"""

from alembic import op

revision: str = "4"
down_revision: str | None = "3"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_index("ix_model_versions_sha256", "model_versions", ["sha256"])
    op.create_index("ix_assignments_client", "assignments", ["client"])
