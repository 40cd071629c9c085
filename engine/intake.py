"""What comes in: requests are checked here, and made into the sequences that the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.api import EngineInfo, GenerateRequest, Grammar, SamplingParams
from engine.choices import Choices, choice_params
from engine.errors import InvalidRequest, RequestTooLong
from engine.output import ChoiceOutput
from engine.sampling import GrammarCompiler, SamplingState, TokenMatcher
from engine.sequence import Sequence
from engine.text import Codec, StopStrings


class Intake:
    """Any thread may call it. `clock` gives seconds; max_choices bounds a request's n."""

    def __init__(self, info: EngineInfo, codec: Codec, max_choices: int, clock: Callable[[], float]) -> None:
        self._info = info
        self._codec = codec
        self._max_choices = max_choices
        self._clock = clock
        self._grammars = GrammarCompiler(codec.vocabulary, codec.eos_ids, lambda text: codec.encode(text).tolist())

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Raises InvalidRequest, RequestTooLong. Compiles the grammar, which may take a tenth of a second."""
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", (token for token, _ in params.logit_bias))
        context, pool = self._info.context_length, self._info.pool_tokens
        asked = 1 if params.max_tokens is None else params.max_tokens
        if prompt_tokens + asked > context:
            raise RequestTooLong(prompt_tokens, params.max_tokens, context, "context")
        if prompt_tokens + min(asked, 1) > pool:
            raise RequestTooLong(prompt_tokens, params.max_tokens, pool, "KV pool")
        self._matcher(params.grammar)

    def check_request(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest, RequestTooLong."""
        tokens = request.tokens
        if tokens.ndim != 1 or len(tokens) == 0:
            raise InvalidRequest("a prompt is a one-dimensional array of at least one token id")
        self._check_ids("prompt", (int(tokens.min()), int(tokens.max())))
        if request.adapter is not None and request.adapter not in self._info.adapters:
            raise InvalidRequest("the request names an adapter that is not loaded")
        if "\0" in request.namespace:
            raise InvalidRequest("a namespace must not contain U+0000")
        if not 1 <= request.n <= self._max_choices:
            raise InvalidRequest(f"n must be between 1 and {self._max_choices}")
        self.check(len(tokens), request.params)

    def choices(self, request: GenerateRequest, number: int) -> Choices:
        """A checked request with its first sequence, numbered so; the others get the numbers behind it."""
        stops = StopStrings(request.params.stop)
        return Choices(request, stops, [self._sequence(number, request, 0, stops)])

    def another(self, choices: Choices) -> Sequence:
        """The next of the missing choices, which joins them."""
        sequence = self._sequence(choices.first.number, choices.request, choices.missing[0], choices.stops)
        choices.sequences.append(sequence)
        return sequence

    def _sequence(self, first: int, request: GenerateRequest, index: int, stops: StopStrings) -> Sequence:
        """Choice `index` of a request whose first sequence has the number `first`."""
        limit = min(self._info.context_length, self._info.pool_tokens)
        params, asked = request.params, request.params.max_tokens
        return Sequence(
            number=first + index,
            index=index,
            request=request,
            sampling=SamplingState(
                choice_params(params, index), self._codec.eos_ids, request.tokens, self._matcher(params.grammar)
            ),
            output=ChoiceOutput(request, index, self._codec.detokenizer(), self._codec.eos_ids, stops),
            capacity=limit if asked is None else min(limit, len(request.tokens) + asked),
            received=self._clock(),
        )

    def _matcher(self, grammar: Grammar | None) -> TokenMatcher | None:
        """Raises InvalidRequest."""
        return None if grammar is None else self._grammars.matcher(grammar)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        size = self._codec.vocab_size
        if not all(0 <= token < size for token in ids):
            raise InvalidRequest(f"{name} has ids outside the vocabulary of {size}")
