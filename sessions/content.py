"""What text may be: anything that both databases and every tokenizer can hold."""

from __future__ import annotations

import re

from sessions.errors import InvalidInput

_SURROGATE = re.compile("[\ud800-\udfff]")
CLIENT_ID_LIMIT = 200
TITLE_LIMIT = 60


def check_text(field: str, value: object) -> str:
    """Any text, also empty. Raises InvalidInput for other types, NUL and lone surrogates."""
    if not isinstance(value, str):
        raise InvalidInput(field, "must be text")
    if "\0" in value:
        raise InvalidInput(field, "must not contain U+0000")
    if _SURROGATE.search(value):
        raise InvalidInput(field, "must not contain lone surrogates")
    return value


def check_content(field: str, value: object) -> str:
    """Text with something in it besides white space."""
    text = check_text(field, value)
    if not text.strip():
        raise InvalidInput(field, "must not be empty")
    return text


def check_client_msg_id(value: object) -> str:
    """A client's own id of a message: text of 1 to 200 code points."""
    text = check_content("client_msg_id", value)
    if len(text) > CLIENT_ID_LIMIT:
        raise InvalidInput("client_msg_id", f"must not be longer than {CLIENT_ID_LIMIT} characters")
    return text


def title_of(content: str) -> str:
    """The first line of a message, cut to 60 code points: what an untitled session is called."""
    return content.strip().splitlines()[0][:TITLE_LIMIT].strip()
