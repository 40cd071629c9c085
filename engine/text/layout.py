"""Which part of a rendered conversation is template and which is content.

The template is rendered twice: with a mark in place of every content, which gives its literals, and with the contents.

    literals   |<|im_start|>user\n|      |<|im_end|>\n<|im_start|>assistant\n|         |<|im_end|>\n...
    contents                      | Hi  |                                    | Hello! |
    pieces     |---- header ------|     |- tail ----|------- header ---------|        |- tail ----|

The two must agree character for character. Where they do not, the template works on the content (it cuts old reasoning,
say); that piece is then rendered text, with the control tokens of the content marked to tell them from the template's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from engine.lru import LruCache
from engine.text.api import ChatMessage
from engine.text.errors import TemplateError
from engine.text.template import ChatTemplate

_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
_PLACE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_PRIVATE = range(0xF0002, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class Seam:
    """The literal between two contents: the end of the first message, then the start of the second.

    header: where the second message is a reply, what the generation prompt has too; else all its start. lead: the rest.
    """

    tail: str
    header: str
    lead: str

    @property
    def text(self) -> str:
        return self.tail + self.header + self.lead


@dataclass(frozen=True, slots=True)
class Fragment:
    """A text, and whether control tokens in it are the template's own (literal) or a user's (content)."""

    text: str
    literal: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """One place where message number `message` appears. opaque: all of the content stands there, perhaps stripped."""

    message: int
    header: str
    lead: str
    content: tuple[Fragment, ...]
    tail: str
    opaque: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """A conversation in the order of its text; `header` is the generation prompt."""

    pieces: tuple[Piece, ...]
    header: str

    def ends_with(self, message: int) -> bool:
        """Whether the text ends with this message, all of it, which stands nowhere else."""
        places = [piece for piece in self.pieces if piece.message == message]
        return len(places) == 1 and places[0] is self.pieces[-1] and places[0].opaque


@dataclass(frozen=True, slots=True)
class _Outline:
    """seams[k] stands before the content of message order[k]; the last one ends the text."""

    seams: tuple[Seam, ...]
    order: tuple[int, ...]


class LayoutFinder:
    """Splits conversations for one template. Outlines are remembered by roles, seams by literal and neighbours."""

    def __init__(self, template: ChatTemplate, control_pattern: re.Pattern[str]) -> None:
        self._template = template
        self._control = control_pattern
        self._outlines: LruCache[tuple[tuple[str, ...], bool, str], _Outline] = LruCache(64)
        self._seams: LruCache[tuple[str | None, str | None, str, bool, str], Seam] = LruCache(256)

    def find(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool, now: datetime) -> Layout:
        """Raises TemplateError when the template refuses the conversation."""
        roles = tuple(message.role for message in messages)
        day = now.isoformat() if self._template.asks_the_date else ""
        key = (roles, add_generation_prompt, day)
        outline = self._outlines.get(key, lambda: self._outline(roles, add_generation_prompt, now, day))
        contents = [message.content for message in messages]
        text = self._render(roles, contents, add_generation_prompt, now)
        pieces = _match(outline, text, contents, self._control)
        if pieces is not None:
            return Layout(pieces, outline.seams[-1].header)
        marks = _Marks(contents, self._control)
        marked = [marks.set(content) for content in contents]
        text = self._render(roles, marked, add_generation_prompt, now)
        return _match_marked(outline, text, marked, marks, self._control)

    def tail(self, roles: tuple[str, ...], now: datetime) -> str:
        """What the template writes after the content of the last message. Raises TemplateError."""
        literals, order = self._literals(roles, False, now)
        return literals[-1] if order and order[-1] == len(roles) - 1 else ""

    def _outline(self, roles: tuple[str, ...], add_generation_prompt: bool, now: datetime, day: str) -> _Outline:
        literals, order = self._literals(roles, add_generation_prompt, now)
        places: list[int | None] = [None, *order, None]
        seams = []
        for literal, first, second in zip(literals, places[:-1], places[1:], strict=True):
            pair = (None if first is None else roles[first], None if second is None else roles[second])
            following = len(roles) if second is None else second
            adjacent = (first is None and following == 0) or (first is not None and following == first + 1)
            if not adjacent:
                seams.append(Seam("", literal, ""))
                continue
            earlier = roles[:following]
            key = (*pair, literal, following == 1, day)
            seams.append(self._seams.get(key, lambda e=earlier, s=pair[1], t=literal: self._seam(e, s, t, now)))  # type: ignore[misc]
        return _Outline(tuple(seams), order)

    def _seam(self, earlier: tuple[str, ...], second: str | None, literal: str, now: datetime) -> Seam:
        """Splits the literal that follows the messages `earlier` by what the template writes when there are no more."""
        tail = self._shorter(earlier, False, now) if earlier else ""
        if tail is None or not literal.startswith(tail):
            return Seam("", literal, "")
        start = literal[len(tail) :]
        if second == "assistant":
            prompted = self._shorter(earlier, True, now)
            if prompted is not None and prompted.startswith(tail) and start.startswith(prompted[len(tail) :]):
                header = prompted[len(tail) :]
                return Seam(tail, header, start[len(header) :])
        return Seam(tail, start, "")

    def _shorter(self, roles: tuple[str, ...], add_generation_prompt: bool, now: datetime) -> str | None:
        """The literal after the last content of a shorter conversation; None where the template refuses it."""
        try:
            literals, order = self._literals(roles, add_generation_prompt, now)
        except TemplateError:
            return None
        in_place = order[-1] == len(roles) - 1 if order else not roles
        return literals[-1] if in_place else None

    def _literals(
        self, roles: tuple[str, ...], add_generation_prompt: bool, now: datetime
    ) -> tuple[list[str], tuple[int, ...]]:
        places = [f"{_OPEN}{number}{_CLOSE}" for number in range(len(roles))]
        parts = _PLACE.split(self._render(roles, places, add_generation_prompt, now))
        return parts[::2], tuple(map(int, parts[1::2]))

    def _render(self, roles: Sequence[str], contents: Sequence[str], add_generation_prompt: bool, now: datetime) -> str:
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, now=now)


class _Marks:
    """Two characters that are in none of the contents; they stand around each control token in them."""

    def __init__(self, contents: Sequence[str], control: re.Pattern[str]) -> None:
        free = (chr(code) for code in _PRIVATE if not any(chr(code) in content for content in contents))
        self.open, self.close = next(free), next(free)
        self._control = control
        token = control.pattern
        # The template may cut a marked token off from one of its marks: a mark on either side is enough.
        self._marked = re.compile(f"{self.open}({token}){self.close}?|({token}){self.close}|[{self.open}{self.close}]")

    def set(self, content: str) -> str:
        return self._control.sub(lambda match: f"{self.open}{match.group()}{self.close}", content)

    def fragments(self, text: str) -> Iterator[Fragment]:
        """Marked text without its marks: marked control tokens are content, all else may be the template's."""
        position = 0
        for match in self._marked.finditer(text):
            if match.start() > position:
                yield Fragment(text[position : match.start()], literal=True)
            if token := match[1] or match[2]:
                yield Fragment(token, literal=False)
            position = match.end()
        if position < len(text):
            yield Fragment(text[position:], literal=True)


def _match(outline: _Outline, text: str, contents: Sequence[str], control: re.Pattern[str]) -> tuple[Piece, ...] | None:
    """The pieces of a text in which each content, in a known form, stands between the literals; else None."""
    seams = outline.seams
    position = len(seams[0].text)
    if not text.startswith(seams[0].text):
        return None
    pieces = []
    for k, number in enumerate(outline.order):
        standing = _standing(text, position, contents[number], seams[k + 1].text, control)
        if standing is None:
            return None
        content, whole = standing
        pieces.append(_piece(seams, k, number, (Fragment(content, literal=False),), opaque=whole))
        position += len(content) + len(seams[k + 1].text)
    return tuple(pieces) if position == len(text) else None


def _match_marked(
    outline: _Outline, text: str, contents: Sequence[str], marks: _Marks, control: re.Pattern[str]
) -> Layout:
    """As `_match`, but for a content that is not found it takes all text before the next literal with a control token.

    Without such a literal the rest of the text belongs to the message at hand, and nothing to those after it.
    """
    seams, order = outline.seams, outline.order
    if not order or not text.startswith(seams[0].text):
        return Layout((_rest(0, text, marks),), "")
    position = len(seams[0].text)
    pieces = []
    for k, number in enumerate(order):
        following = seams[k + 1].text
        standing = _standing(text, position, contents[number], following, control)
        if standing is not None:
            end: int | None = position + len(standing[0])
        else:
            end = _find(text, position, following, marks, control, last=k + 1 == len(order))
        if end is None:
            pieces.append(_rest(number, seams[k].header + seams[k].lead + text[position:], marks))
            return Layout(tuple(pieces), "")
        fragments = tuple(marks.fragments(text[position:end]))
        if standing is not None:
            fragments = (Fragment("".join(fragment.text for fragment in fragments), literal=False),)
        pieces.append(_piece(seams, k, number, fragments, opaque=standing is not None and standing[1]))
        position = end + len(following)
    return Layout(tuple(pieces), seams[-1].header)


def _standing(
    text: str, position: int, content: str, following: str, control: re.Pattern[str]
) -> tuple[str, bool] | None:
    """The form of the content that stands at `position`, before `following`, and whether that is all of it."""
    for form, whole in _forms(content, control):
        if text.startswith(form, position) and text.startswith(following, position + len(form)):
            return form, whole
    return None


def _forms(content: str, control: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """What templates make of a content: all of it, or what follows its last tag (reasoning goes so), maybe stripped."""
    yield from ((form, True) for form in (content, content.strip(), content.lstrip(), content.rstrip()))
    end = max((match.end() for match in control.finditer(content)), default=None)
    if end is not None:
        rest = content[end:]
        yield from ((form, False) for form in (rest, rest.lstrip("\n"), rest.strip("\n"), rest.strip(), rest.lstrip()))


def _find(text: str, position: int, literal: str, marks: _Marks, control: re.Pattern[str], *, last: bool) -> int | None:
    if last:
        end = len(text) - len(literal)
        return end if end >= position and text.endswith(literal) else None
    if not control.search(literal):
        return None
    end = text.find(literal, position)
    while end > 0 and text[end - 1] == marks.open:  # a user's token, not the template's
        end = text.find(literal, end + 1)
    return end if end >= 0 else None


def _piece(seams: Sequence[Seam], k: int, message: int, content: tuple[Fragment, ...], *, opaque: bool) -> Piece:
    return Piece(message, seams[k].header, seams[k].lead, content, seams[k + 1].tail, opaque)


def _rest(message: int, text: str, marks: _Marks) -> Piece:
    return Piece(message, "", "", tuple(marks.fragments(text)), "", opaque=False)
