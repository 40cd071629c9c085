"""Conversations to ids, exactly as the model was trained to see them, and with every id that is known used again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.errors import InvalidRequest, ModelError
from engine.lru import LruCache
from engine.text.api import ChatMessage, Encoded, Prompt
from engine.text.assets import ChatAssets
from engine.text.detokenizer import Detokenizer
from engine.text.encoder import Control, Encoder, Part, Start, end_of
from engine.text.errors import TemplateError
from engine.text.fingerprint import context_of, fingerprint_of
from engine.text.layout import Fragment, LayoutFinder, Piece
from engine.text.replies import ReplyMemory, Trail
from engine.text.template import ChatTemplate, default_template
from engine.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from engine.api import SamplingParams

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Closing:
    """The literal after a reply: text, then the template's end token, then the rest. end None: all is `text`.

    whole and rest: the ids of all of it and of what follows the end token, each with what stands before the next text.
    """

    text: str
    end: Control | None
    whole: tuple[Ids, Start]
    rest: tuple[Ids, Start]


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply in the prompt: its ids there, what to store for it, what stands before the next text."""

    ids: Ids
    after: Start
    stored: Encoded


class Codec:
    """The ChatCodec of one model. Safe to share between threads.

    A prompt is a chain of segments, one for each message:

        user, system   [header + content + tail]                stored under fingerprint:hash of the literals in it
        assistant      [header] [reply, end token last] [tail]  stored: the reply's ids, under the fingerprint

    Within a segment, literal and content between two control tokens are encoded as one text. A reply is encoded apart
    from its header, since that is how it is sampled: the next prompt goes on exactly where sampling stopped.
    """

    def __init__(self, assets: ChatAssets, *, memory: ReplyMemory | None = None) -> None:
        """memory: sampled replies by their text; a new one unless given. Raises ModelError for unusable assets."""
        try:
            tokenizer = json.loads(assets.tokenizer_json)
            self._vocabulary = Vocabulary(tokenizer)
            self._encoder = Encoder(tokenizer)
        except ModelError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise ModelError(f"the model's tokenizer.json cannot be used: {error!r}") from error
        source = assets.chat_template if assets.chat_template is not None else default_template(self._encoder.controls)
        self._template = ChatTemplate(source, assets.special_tokens)
        self._fingerprint = fingerprint_of(assets, source)
        self._layouts = LayoutFinder(self._template, self._encoder.control_pattern)
        self._literals: LruCache[tuple[str, Start], tuple[Ids, Start]] = LruCache(512)
        self._closings: LruCache[str, _Closing] = LruCache(64)
        self._memory = memory if memory is not None else ReplyMemory()
        self._assets = assets
        self._started = datetime.now()
        end = self._template_end()
        self._eos_ids = frozenset(assets.eos_ids) | ({end.id} if end is not None else frozenset())

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the tokenizer, the template or the tokens it names."""
        return self._fingerprint

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        """The largest id + 1."""
        return len(self._vocabulary)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a reply: those of the model's files and the template's own end token."""
        return self._eos_ids

    @property
    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults, else OpenAI's. Raises ModelError where they are out of range."""
        from engine.api import SamplingParams  # engine.api imports this package

        named = self._assets.sampling
        limit = named.get("max_tokens")
        try:
            return SamplingParams(
                temperature=named.get("temperature", 1.0),
                top_p=named.get("top_p", 1.0),
                top_k=max(int(named.get("top_k", 0)), 0),  # some files say -1 for all
                min_p=named.get("min_p", 0.0),
                repetition_penalty=named.get("repetition_penalty", 1.0),
                max_tokens=None if limit is None else int(limit),
            )
        except (ValueError, OverflowError) as error:
            raise ModelError(f"the sampling defaults of the model's files cannot be used: {error}") from error

    def detokenizer(self) -> Detokenizer:
        """A new one, for one stream of ids."""
        return Detokenizer(self._vocabulary)

    def encode(self, text: str, *, continued: bool = False) -> Ids:
        """Plain text to ids; control tokens in it stay text, and no bos is added.

        continued: the ids will follow those of other text (SentencePiece marks only the start of a text by a space).
        """
        return self._ids([text], Start.INSIDE if continued else Start.OF_PROMPT)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Ids to text; control ids are left out, bytes that form no character become U+FFFD, as does U+0000."""
        detokenizer = self.detokenizer()
        return detokenizer.push(ids) + detokenizer.flush()

    def remember(self, namespace: str, prompt_tokens: Ids, ids: Sequence[int] | Ids, text: str) -> None:
        """Notes that `ids` were sampled after `prompt_tokens` and sent as `text`, for `prompt(namespace=...)`."""
        self._memory.remember(namespace, prompt_tokens, np.asarray(ids, dtype=np.int32), text)

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        namespace: str | None = None,
        now: datetime | None = None,
    ) -> Prompt:
        """The ids the model must see for this conversation; see ChatCodec.

        segments[i] of an assistant message: the ids that came with it, as they came; else those remembered or encoded,
        the template's end token included, under `fingerprint`. namespace: where to look up replies that came without
        ids; None: nowhere. now: the time to tell a template which asks for the date; None: when this codec was made.

        A template that alters a content, or leaves one out, gets what it wants; such segments are encoded anew every
        time (their fingerprint ends in `:altered`).

        continue_final_message: the last reply is left open. Ids that are known for it are used without their eos; a
        template that strips replies strips this one too. Raises TemplateError, InvalidRequest.
        """
        if continue_final_message and (add_generation_prompt or not messages or messages[-1].role != "assistant"):
            raise InvalidRequest("only a last message of the assistant can be continued, without a generation prompt")
        layout = self._layouts.find(
            messages, add_generation_prompt=add_generation_prompt, now=self._started if now is None else now
        )
        if continue_final_message and not layout.ends_with(len(messages) - 1):
            raise TemplateError("the model's chat template alters the last message, so it cannot be continued")
        trail = Trail(namespace) if namespace is not None else None
        chain: list[Ids] = []
        counts = [0] * len(messages)
        segments: list[Encoded | None] = [None] * len(messages)
        places = Counter(piece.message for piece in layout.pieces)
        start = Start.OF_PROMPT
        opening = 0

        def add(ids: Ids) -> int:
            chain.append(ids)
            if trail is not None:
                trail.extend(ids)
            return len(ids)

        for piece in layout.pieces:
            message = messages[piece.message]
            if message.role == "assistant" and piece.opaque:
                header, start = self._literal(piece.header, start)
                counts[piece.message] += add(header)
                left_open = continue_final_message and piece is layout.pieces[-1]
                reply = self._reply(piece, message, start, trail, left_open=left_open)
                counts[piece.message] += (added := add(reply.ids))
                opening = added if left_open else 0
                segment, start = reply.stored, reply.after
            else:
                segment, start = self._stated(piece, message, start, once=places[piece.message] == 1)
                counts[piece.message] += add(segment.ids)
            segments[piece.message] = segment
        header, _ = self._literal(layout.header, start)
        chain.append(header)
        return Prompt(
            tokens=np.concatenate(chain),
            segments=tuple(self._kept(message, segment) for message, segment in zip(messages, segments, strict=True)),
            message_tokens=tuple(counts),
            header_tokens=len(header),
            opening_tokens=opening,
        )

    def _stated(self, piece: Piece, message: ChatMessage, start: Start, *, once: bool) -> tuple[Encoded, Start]:
        """The segment of a system or user message, or of any message whose content the template altered."""
        parts = [
            *self._encoder.split(piece.header + piece.lead),
            *self._content(piece.content),
            *self._encoder.split(piece.tail),
        ]
        after = end_of(parts, start)
        fingerprint = f"{self._fingerprint}:altered"
        if piece.opaque and once:
            fingerprint = f"{self._fingerprint}:{context_of(piece, message, start)}"
            if message.encoded is not None and message.encoded.fingerprint == fingerprint:
                return message.encoded, after
        return Encoded(self._ids(parts, start), fingerprint), after

    def _content(self, fragments: tuple[Fragment, ...]) -> list[Part]:
        parts: list[Part] = []
        for fragment in fragments:
            parts += self._encoder.split(fragment.text) if fragment.literal else [fragment.text]
        return parts

    def _reply(
        self, piece: Piece, message: ChatMessage, start: Start, trail: Trail | None, *, left_open: bool
    ) -> _Reply:
        """left_open: without its end, for the model to go on with."""
        closing = self._closings.get(piece.tail, lambda: self._closing(piece.tail))
        stored = self._known(message, trail)
        if stored is None:
            parts = [*self._encoder.split(piece.lead), *self._content(piece.content)]
            if closing.end is not None and not left_open:
                parts += [closing.text, closing.end]
            stored = Encoded(self._ids(parts, start), self._fingerprint)
        if left_open:
            ended = len(stored.ids) > 0 and int(stored.ids[-1]) in self._eos_ids
            return _Reply(stored.ids[:-1] if ended else stored.ids, Start.INSIDE, stored)
        return _Reply(*self._closed(stored.ids, closing), stored)

    def _closed(self, ids: Ids, closing: _Closing) -> tuple[Ids, Start]:
        """Reply ids with the template's closing: its end token takes the place of any other, and is never doubled."""
        last = int(ids[-1]) if len(ids) else None
        ended = closing.end is not None and last == closing.end.id
        if last in self._eos_ids and not ended:
            ids = ids[:-1]
            if closing.end is not None:
                ids, ended = np.append(ids, np.int32(closing.end.id)), True
        following, after = closing.rest if ended else closing.whole
        return np.concatenate((ids, following)), after

    def _known(self, message: ChatMessage, trail: Trail | None) -> Encoded | None:
        if (
            message.encoded is not None
            and message.encoded.fingerprint == self._fingerprint
            and len(message.encoded.ids)
        ):
            return message.encoded
        found = self._memory.find(trail, message.content) if trail is not None else None
        return Encoded(found, self._fingerprint) if found is not None else None

    def _kept(self, message: ChatMessage, segment: Encoded | None) -> Encoded:
        """What to store: generated ids stay with their message even where the template altered its content."""
        if message.role == "assistant" and (known := self._known(message, None)) is not None:
            return known
        return segment if segment is not None else Encoded(np.empty(0, dtype=np.int32), f"{self._fingerprint}:altered")

    def _literal(self, text: str, start: Start) -> tuple[Ids, Start]:
        """The ids of a literal that is encoded apart, and what then stands before the next text."""
        return self._literals.get((text, start), lambda: self._encoded(self._encoder.split(text), start))

    def _encoded(self, parts: Sequence[Part], start: Start) -> tuple[Ids, Start]:
        return self._ids(parts, start), end_of(parts, start)

    def _ids(self, parts: Sequence[Part], start: Start) -> Ids:
        return np.array(self._encoder.encode(parts, start), dtype=np.int32)

    def _closing(self, tail: str) -> _Closing:
        parts = self._encoder.split(tail)
        whole = self._encoded(parts, Start.INSIDE)
        for place, part in enumerate(parts):
            if isinstance(part, Control):
                rest = self._encoded(parts[place + 1 :], part.after)
                return _Closing("".join(map(str, parts[:place])), part, whole, rest)
        return _Closing(tail, None, whole, whole)

    def _template_end(self) -> Control | None:
        """The control token that the template writes after a reply."""
        try:
            tail = self._layouts.tail(("user", "assistant"), self._started)
        except TemplateError:
            return None
        return self._closing(tail).end
