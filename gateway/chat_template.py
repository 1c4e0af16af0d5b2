"""Renders a conversation with the model's own Jinja chat template, sandboxed, in the environment that Hugging Face
transformers gives templates. Decides nothing about tokens; see tokenizer.py for how the text becomes ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from fairlane.errors import FieldViolation, InvalidRequest

_MAX_TEMPLATE_MESSAGE = 200


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for inference its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes HTML, which a model must not see.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template. Raises jinja2.TemplateSyntaxError for text that is none."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], local_now: Callable[[], datetime] = datetime.now) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: local_now().strftime(pattern)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text, ending where the assistant's answer begins. Raises InvalidRequest when the template refuses the
        conversation (say, roles that do not alternate)."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            # A TemplateError is the template author's own sentence; other exceptions could quote the conversation.
            said = str(error)[:_MAX_TEMPLATE_MESSAGE] if type(error) is jinja2.TemplateError else "it could not be rendered"
            raise InvalidRequest([FieldViolation("messages", f"refused by the model's chat template: {said}")]) from None
