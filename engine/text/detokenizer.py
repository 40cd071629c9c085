"""Sampled ids to text, as soon as characters are whole and never before."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from engine.text.vocabulary import Vocabulary


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
        self._pending_ids = 0

    @property
    def pending_ids(self) -> int:
        """How many ids, from the first to the last that has bytes in it, belong to a character which is not whole.

        Control ids after them are not counted.
        """
        return self._pending_ids

    def push(self, ids: Iterable[int]) -> str:
        """The text that became whole with these ids."""
        pieces = [self._vocabulary.bytes_of(int(token)) for token in ids]
        joined = b"".join(pieces)
        if not joined:
            return ""
        if self._at_start:
            self._at_start = False
            if joined.startswith(b" "):
                joined = joined[1:]
        text = self._decoder.decode(joined)
        self._pending_ids = self._count_pending(pieces)
        return text.replace("\0", "\ufffd")

    def flush(self) -> str:
        """Ends the stream: U+FFFD for a character that was never whole, else nothing."""
        self._pending_ids = 0
        return self._decoder.decode(b"", final=True)

    def _count_pending(self, pieces: list[bytes]) -> int:
        waiting = len(self._decoder.getstate()[0])
        if not waiting:
            return 0
        while pieces and not pieces[-1]:
            pieces.pop()
        for count, piece in enumerate(reversed(pieces), start=1):
            waiting -= len(piece)
            if waiting <= 0:
                return count
        return self._pending_ids + len(pieces)
