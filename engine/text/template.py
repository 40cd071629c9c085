"""Chat templates: Jinja in a sandbox, with what the templates of released models expect to find."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError
from engine.text.errors import TemplateError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For a model without a template whose vocabulary has <|im_start|> and <|im_end|>."""

PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' and eos_token is defined %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""For every other model without one: `User: ...`, a blank line, `Assistant: ...` and the eos token, if there is one."""


def default_template(vocabulary: Container[str]) -> str:
    """For a model that brings none, by the control tokens that it has."""
    return CHATML if "<|im_start|>" in vocabulary and "<|im_end|>" in vocabulary else PLAIN


class ChatTemplate:
    """One compiled template. `variables` are the special tokens it may use."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Raises ModelError when the template is not valid Jinja."""
        self.source = source
        self.asks_the_date = "strftime_now" in source
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, now: datetime) -> str:
        """The text of a conversation of {role, content}. `now` is what a template that asks for the date gets.

        Raises TemplateError when the template refuses.
        """
        try:
            return self._template.render(
                **self._variables,
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=now.strftime,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template refuses this conversation: {error}") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
            raise TemplateError(f"the model's chat template cannot render this conversation: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks replies for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
