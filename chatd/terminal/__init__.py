"""The terminal client: keyboard, connection, and the line below an answer."""
