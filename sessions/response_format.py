"""What a reply must be, as OpenAI's response_format says it, and as the engine takes it.

    {"type": "text"}
    {"type": "json_object"}
    {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}, "strict": true, "description": ...}}
    {"type": "regex", "pattern": ...}                                                     (not OpenAI's)

A schema always is followed strictly; name, strict and description change nothing.
"""

from __future__ import annotations

import json

from engine.api import Grammar

_ABOUT = {"name", "description", "strict"}


def grammar_of(value: object) -> Grammar | None:
    """None for plain text. Raises ValueError for anything but the forms above."""
    match value:
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if not rest:
            return Grammar("json_object")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **about}, **rest} if not rest:
            if about.keys() <= _ABOUT:
                return Grammar("json_schema", json.dumps(schema))  # in their order: it is that of the reply's fields
        case {"type": "regex", "pattern": str(pattern), **rest} if not rest:
            return Grammar("regex", pattern)
    raise ValueError("is none of text, json_object, json_schema and regex in its form")
