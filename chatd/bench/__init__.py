"""Measurements: of the cache and the model alone, and of servers under load."""
