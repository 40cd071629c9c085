"""One choice's sampled ids on their way to a client: their text, where it ends, and what may go out."""

from __future__ import annotations

from collections import deque

from engine.api import Delta, FinishReason, GenerateRequest, SampledLogprob
from engine.text.detokenizer import Detokenizer
from engine.text.stops import StopMatcher, StopStrings

Sampled = tuple[int, SampledLogprob | None]


class ChoiceOutput:
    """Text goes out together with the ids that spell it, no later than it must.

        ids    | sent  | kept whole | begins a stop | of an unfinished character |
        text   | sent  | goes out   | held          | (bytes only)
               0     _sent        safe            whole text

    Ids go out when all their characters are whole and cannot belong to a stop string any more. When the text ends:

    - held text goes out, unless a stop string was found: then what stands before the string;
    - bytes of a character that will never be whole are dropped, with their ids;
    - where the end lies inside a token, its text up to there is sent without its id, and so is all that follows:
      `Delta.unspelled` counts these characters. Ids that were sent always spell exactly the text before them.

    Stop strings are looked for in the text that becomes whole after the first min_tokens tokens.
    """

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        detokenizer: Detokenizer,
        eos_ids: frozenset[int],
        stops: StopStrings,
    ) -> None:
        """stops: those of the request; one object may serve all its choices."""
        self._request_id = request.id
        self._index = index
        self._detokenizer = detokenizer
        ends = frozenset(request.params.stop_token_ids)
        self._end_ids = ends if request.params.ignore_eos else ends | eos_ids
        self._silent_ids = self._end_ids & eos_ids
        self._stops = StopMatcher(stops)
        self._min_tokens = request.params.min_tokens
        self._reason: FinishReason | None = None
        self._tokens = 0
        self._held_text = ""
        self._sent = 0
        # Ids that were not sent: first those in `_ready`, each group with the place where its text ends, then the rest.
        self._ready: deque[tuple[int, list[Sampled]]] = deque()
        self._open: list[Sampled] = []
        self._closed_ids = 0

    @property
    def reason(self) -> FinishReason | None:
        """Why the choice has ended; None while it goes on."""
        return self._reason

    def push(self, token: int, logprob: SampledLogprob | None = None, *, last: bool = False) -> Delta | None:
        """What a sampled token lets out, if anything. last: no more can follow, so the choice ends with `length`.

        An eos or stop id, or a stop string, ends the choice with `stop`. Call neither this nor `end` after an end.
        """
        self._tokens += 1
        if token in self._silent_ids:
            return self._ended("stop", (token, logprob))
        text = self._detokenizer.push((token,))
        self._held_text += text
        self._open.append((token, logprob))
        self._close_groups()
        if self._tokens > self._min_tokens and (start := self._stops.push(text)) is not None:
            end = self._detokenizer.characters - len(text) + start
            self._held_text = self._held_text[: end - self._sent]
            return self._ended("stop")
        if token in self._end_ids:
            return self._ended("stop")
        if last:
            return self._ended("length")
        return self._let_out(self._detokenizer.characters - self._stops.held)

    def end(self, reason: FinishReason) -> Delta:
        """Ends the choice from outside and gives its last delta."""
        return self._ended(reason)

    def _close_groups(self) -> None:
        ids, characters = self._detokenizer.whole
        count = ids - self._closed_ids
        if count:
            self._ready.append((characters, self._open[:count]))
            del self._open[:count]
            self._closed_ids = ids

    def _ended(self, reason: FinishReason, final: Sampled | None = None) -> Delta:
        """The last delta. `final`: an id without text of its own."""
        self._reason = reason
        end = self._sent + len(self._held_text)
        sent, spelled = self._take(end)
        unspelled = end - spelled
        if final is not None and not unspelled:
            sent.append(final)
        return self._delta(sent, self._held_text, unspelled)

    def _let_out(self, safe: int) -> Delta | None:
        sent, spelled = self._take(safe)
        if not sent:
            return None
        count = spelled - self._sent
        text, self._held_text = self._held_text[:count], self._held_text[count:]
        self._sent = spelled
        return self._delta(sent, text, 0)

    def _take(self, end: int) -> tuple[list[Sampled], int]:
        """The unsent ids whose text ends at `end` or before, and where it does."""
        sent: list[Sampled] = []
        spelled = self._sent
        while self._ready and self._ready[0][0] <= end:
            spelled, group = self._ready.popleft()
            sent += group
        return sent, spelled

    def _delta(self, sent: list[Sampled], text: str, unspelled: int) -> Delta:
        return Delta(
            request_id=self._request_id,
            ids=tuple(token for token, _ in sent),
            text=text,
            index=self._index,
            logprobs=tuple(logprob for _, logprob in sent if logprob is not None),
            reason=self._reason,
            unspelled=unspelled,
        )
