"""Alembic's entry point: it runs over the connection that `database.upgrade` hands in."""

from alembic import context

from umbel.server.store.tables import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
