"""Sampled ids to text, as soon as characters are whole and never before."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import NamedTuple

from engine.text.vocabulary import Vocabulary


class Whole(NamedTuple):
    """The first `ids` ids spell exactly the first `characters` characters of the text."""

    ids: int
    characters: int


class Detokenizer:
    """The text of one stream of ids. The deltas together are all bytes decoded as UTF-8 with errors="replace".

        ids    ... | H | i | F0 9F | 91 | A8 |     <- nothing comes out before the third id of the character
        deltas     "H" "i"   ""      ""   "👨"

    At most three bytes wait. Bytes that cannot become a character come out as U+FFFD at once; so does U+0000.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = vocabulary.strips_first_space
        self._ids = 0
        self._characters = 0
        self._whole = Whole(0, 0)

    @property
    def whole(self) -> Whole:
        """The last place where ids and text end together, among the ends of the portions pushed.

        An id that ends one character and begins another has no such place on either side.
        """
        return self._whole

    @property
    def characters(self) -> int:
        """How many characters have come out."""
        return self._characters

    def push(self, ids: Iterable[int]) -> str:
        """The text that became whole with these ids."""
        pieces = [self._vocabulary.bytes_of(int(token)) for token in ids]
        joined = b"".join(pieces)
        if self._at_start and joined:
            self._at_start = False
            if joined.startswith(b" "):
                joined = joined[1:]
        text = self._decoder.decode(joined)
        self._ids += len(pieces)
        self._characters += len(text)
        self._mark(pieces)
        return text.replace("\0", "\ufffd")

    def flush(self) -> str:
        """Ends the stream: U+FFFD for a character that was never whole, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self._characters += len(text)
        self._whole = Whole(self._ids, self._characters)
        return text

    def _mark(self, pieces: list[bytes]) -> None:
        """Moves `whole` on: before the first id with a waiting byte, unless it has finished text as well."""
        waiting = len(self._decoder.getstate()[0])
        ids = self._ids
        for piece in reversed(pieces):
            if waiting <= 0:
                break
            ids -= 1
            waiting -= len(piece)
        if waiting == 0:
            self._whole = Whole(ids, self._characters)
