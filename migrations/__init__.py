"""The database schema, step by step."""

NEWEST = "0001"
"""The last step's revision: a database that has it is left as it is."""
