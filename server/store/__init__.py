"""The database: tables, transactions, and the stores that load and save rows."""
