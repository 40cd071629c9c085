"""Where a text ends because one of many strings has come: all of them are looked for at once.

Aho and Corasick, "Efficient string matching: an aid to bibliographic search" (1975): the strings are the paths of a
tree; where a character leads no further, a link goes to the longest suffix of what was read that is a path as well. So
each character costs at most two steps on average, however many strings there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """The strings of one request. Built once, in time linear in their characters; many matchers may share it.

    A state is the longest suffix of the text so far that begins some string; 0 is the empty one.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        """Raises ValueError for an empty string."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._ending = [0]
        for string in strings:
            self._add(string)
        self._fallback = self._links()

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return len(self._next) > 1

    def _add(self, string: str) -> None:
        if not string:
            raise ValueError("a stop string must not be empty")
        state = 0
        for character in string:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._ending.append(0)
            state = following
        self._ending[state] = len(string)

    def _links(self) -> list[int]:
        fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:  # by depth: the state that a link goes to is shorter, and finished already
            state = queue.popleft()
            if not self._ending[state]:
                self._ending[state] = self._ending[fallback[state]]
            for character, following in self._next[state].items():
                shorter = fallback[state]
                while shorter and character not in self._next[shorter]:
                    shorter = fallback[shorter]
                fallback[following] = self._next[shorter].get(character, 0)
                queue.append(following)
        return fallback

    def step(self, state: int, character: str) -> tuple[int, int]:
        """The state after `character`, and how many transitions were tried to find it."""
        tried = 1
        while state and character not in self._next[state]:
            state = self._fallback[state]
            tried += 1
        return self._next[state].get(character, 0), tried

    def depth(self, state: int) -> int:
        """How many characters at the end of the text may be the beginning of a string."""
        return self._depth[state]

    def ending(self, state: int) -> int:
        """The length of the longest string that ends with the text so far; 0 where none does."""
        return self._ending[state]


class StopMatcher:
    """Follows one text, which comes in pieces of any size, up to the earliest end of any of the strings.

    text    H e r e   i s   A B C D E | F           stop "DEF"
            <----- safe ------->  held  ^ the end: found; the text is what stands before the string
    """

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._tried = 0

    @property
    def held(self) -> int:
        """How many characters at the end of the text may belong to a string: the longest suffix that begins one."""
        return self._strings.depth(self._state)

    @property
    def transitions(self) -> int:
        """Transitions tried so far: the work that the text has cost."""
        return self._tried

    def push(self, text: str) -> int | None:
        """Goes on with `text`; None, or where the string that ends first begins, counted from the start of `text`.

        Negative where it begins in an earlier piece. Of several that end with the same character, the longest counts.
        After a string was found the matcher is done.
        """
        strings, state = self._strings, self._state
        if not strings:
            return None
        for place, character in enumerate(text):
            state, tried = strings.step(state, character)
            self._tried += tried
            if length := strings.ending(state):
                return place + 1 - length
        self._state = state
        return None
