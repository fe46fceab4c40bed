"""Render messages with the model's chat template, adding tools for templates without tool support."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3
from jinja2 import Environment, TemplateError, meta

from epd_serve.config.model_files import check_template, parse_template
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.tokenizer import MARK
from epd_serve.protocol.openai.tool_format import HERMES, probe_messages, recognise
from epd_serve.protocol.wire import ChatMessage, PromptOptions
from epd_serve.types import Thinking

logger = logging.getLogger(__name__)
#: Errors that templates raise for unsupported chats.
_REFUSALS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
#: Clients send these to every model; drop those that the template does not use.
_OF_ANY_MODEL = ("enable_thinking", "reasoning_effort")
THINK_START, THINK_END = "<think>", "</think>"
_TOOL_PROMPT = """\
You may call functions to answer. These are the functions, one JSON schema a line:
{tools}
To call one, write its name and its arguments as JSON between these tags:
<tool_call>
{{"name": "<function>", "arguments": {{...}}}}
</tool_call>"""


class ChatTemplate:
    """Renders chats of one model. Thread-safe."""

    def __init__(
        self, tokenizer: Any, path: Path, literals: MediaLiterals, placeholders: Mapping[str, str]
    ) -> None:
        """Check the template. ``placeholders``: text of an item by modality, for templates that join strings.

        Raises ValueError for invalid Jinja, or a template that does not render message text.
        """
        self._tokenizer = tokenizer
        self._literals = literals
        self._placeholders = placeholders
        separate = path / "chat_template.json"  # of older checkpoints
        if not tokenizer.chat_template and separate.exists():
            tokenizer.chat_template = json.loads(separate.read_text())["chat_template"]
        if isinstance(tokenizer.chat_template, str):
            check_template(tokenizer.chat_template, path)
        shown, shown_of_parts = self._num_shown(as_parts=False), self._num_shown(as_parts=True)
        self._takes_parts = shown_of_parts > shown
        self._joins_strings = shown > shown_of_parts
        if shown == 0 and not self._takes_parts:
            raise ValueError(f"{path}: the chat template renders no message text; copy the original model's")
        self._native_format = self._find_format() if tokenizer.chat_template else None

    def _num_shown(self, *, as_parts: bool) -> int:
        """Count the roles whose text the template renders, with contents as strings or as parts.

        Some templates ignore strings; some refuse a system message. Return -1 if the template is missing or
        refuses all chats.
        """
        words = {role: f"word-{role}" for role in ("system", "user", "assistant")}
        most = -1
        for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
            chat = [
                {"role": one, "content": [{"type": "text", "text": words[one]}] if as_parts else words[one]}
                for one in roles
            ]
            try:
                text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            except _REFUSALS:
                continue
            # text in quotation marks means that the template printed the list of parts
            most = max(most, sum(word in text and not re.search(f"['\"]{word}", text) for word in words.values()))
        return most

    @cached_property
    def _known_names(self) -> frozenset[str]:
        """Variables that the template reads."""
        source = self._tokenizer.get_chat_template()
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        try:
            tree = parse_template(environment, source)
        except TemplateError:
            return frozenset(("tools",)) if "tools" in source else frozenset()
        return frozenset(meta.find_undeclared_variables(tree))

    def _find_format(self) -> str | None:
        """Return the template's tool call format, or None if it supports no tools or an unknown format."""
        if "tools" not in self._known_names:
            return None
        chat = probe_messages()
        if self._takes_parts:
            chat = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in chat]
        tool = {"type": "function", "function": {"name": "other", "description": "", "parameters": {}}}
        try:
            found = recognise(self._tokenizer.apply_chat_template(chat, tools=[tool], tokenize=False))
        except _REFUSALS:
            found = None
        if found is None:
            logger.warning(
                "the chat template uses an unknown tool call format; describing tools in the system message and "
                "using the Hermes format"
            )
        return found

    @property
    def tool_format(self) -> str:
        """Name of the format in which the model calls tools."""
        return self._native_format or "hermes"

    @cached_property
    def thinking(self) -> Thinking | None:
        """Thinking tokens ``<think>`` and ``</think>``, or None if the model does not use them."""
        if not self._tokenizer.chat_template or THINK_END not in self._tokenizer.get_chat_template():
            return None
        start, end, after = (
            self._tokenizer.encode(text, add_special_tokens=False) for text in (THINK_START, THINK_END, "\n\n")
        )
        if len(start) != 1 or len(end) != 1:
            return None
        return Thinking(start_id=start[0], end_id=end[0], after_ids=tuple(after))

    @cached_property
    def _taken_names(self) -> frozenset[str]:
        """Template variables that a request must not set."""
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return frozenset((*parameters, "messages", "tools", *self._tokenizer.special_tokens_map))

    def render(self, messages: Sequence[ChatMessage], options: PromptOptions) -> str:
        """Return the text, with the request's spellings of media tokens marked (:class:`MediaLiterals`).

        Raises InvalidRequest if the template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        tools = json.loads(options.tools) if options.tools else None
        native = self._native_format
        rendered = [_message(message, native) for message in messages]
        if not native and (tools or any(message.tool_calls or message.role == "tool" for message in messages)):
            _write_tools(rendered, messages, tools)
        if self._takes_parts:
            for message in rendered:
                if isinstance(message["content"], str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
        arguments: dict[str, Any] = json.loads(options.template_kwargs or "{}")
        for name in _OF_ANY_MODEL:
            if name not in self._known_names:
                arguments.pop(name, None)
        for name in arguments:
            if name in self._taken_names or name not in self._known_names:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name[:60]}: unknown argument of the model's chat template",
                    param=f"chat_template_kwargs.{name[:60]}",
                )
        rendered, tools, arguments = self._literals.marked([rendered, tools if native else None, arguments])
        if self._joins_strings:
            for message in rendered:
                if not isinstance(message["content"], str):
                    pieces = (one.get("text", self._placeholders.get(one["type"])) for one in message["content"])
                    message["content"] = "\n".join(filter(None, pieces))
        try:
            text: str = self._tokenizer.apply_chat_template(
                rendered,
                tools=tools,
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **arguments,
            )
        except _REFUSALS as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return text


def _message(message: ChatMessage, format: str | None) -> dict[str, Any]:
    """Convert a message for chat templates: text as a string, content with media as a list of parts.

    ``format`` is the template's tool call format, or None if it supports none.
    """
    rendered: dict[str, Any] = {"role": message.role}
    if all(part.type == "text" for part in message.content):
        rendered["content"] = "".join(part.text for part in message.content)
    else:
        rendered["content"] = [
            {"type": "text", "text": p.text} if p.type == "text" else {"type": p.type} for p in message.content
        ]
    if format and message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": _id_for(format, call.id),
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if format and message.tool_call_id:
        rendered["tool_call_id"] = _id_for(format, message.tool_call_id)
    # few templates use these; the others ignore them
    if message.name:
        rendered["name"] = message.name
    if message.reasoning:
        rendered["reasoning_content"] = message.reasoning
    return rendered


def _id_for(format: str, id: str) -> str:
    """Return a call id that the template accepts: Mistral's templates require 9 characters."""
    return blake3(id.encode()).hexdigest()[:9] if format.startswith("mistral") else id


def _write_tools(rendered: list[dict[str, Any]], messages: Sequence[ChatMessage], tools: list[Any] | None) -> None:
    """Write tools, calls and results into the text, for templates without tool support."""
    for entry, message in zip(rendered, messages, strict=True):
        if message.role == "tool":
            entry["role"] = "user"
            entry["content"] = _around(entry["content"], "<tool_response>\n", "\n</tool_response>")
        if message.tool_calls:
            calls = "\n" * bool(message.content) + HERMES.write(message.tool_calls)
            entry["content"] = _around(entry["content"], "", calls)
    if tools:
        prompt = _TOOL_PROMPT.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))
        if rendered and rendered[0]["role"] == "system":
            rendered[0]["content"] = _around(rendered[0]["content"], "", "\n\n" + prompt)
        else:
            rendered.insert(0, {"role": "system", "content": prompt})


def _around(content: Any, before: str, after: str) -> Any:
    if isinstance(content, str):
        return before + content + after
    return [{"type": "text", "text": before}, *content, {"type": "text", "text": after}]


#: Configuration fields that hold ids of media tokens.
_FIELD = re.compile(r"(image|video|vision|audio)\w*_token_(id|index)")


class MediaLiterals:
    """Marks spellings of media tokens in a request, so that they are tokenized as text.

    Splitting a text at its marks breaks up these spellings.
    """

    def __init__(self, tokenizer: Any, config: Any, tokens: Collection[str] = ()) -> None:
        """Collect the spellings; ``tokens`` are additional to those of the configuration's fields."""
        added = tokenizer.added_tokens_decoder
        fields = config.to_dict().items()
        ids = {value for name, value in fields if _FIELD.fullmatch(name) and isinstance(value, int)}
        spellings = [str(one.content) for id, one in added.items() if id in ids or one.content in tokens]
        longest_first = sorted(spellings, key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def marked(self, value: Any) -> Any:
        """Return a copy of strings, lists and dicts with all spellings marked and existing marks replaced."""
        if isinstance(value, str):
            plain = value.replace(MARK, "\N{REPLACEMENT CHARACTER}")
            return self._spelling.sub(lambda found: found[0][0] + MARK + found[0][1:], plain)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(one) for key, one in value.items()}
        return [self.marked(one) for one in value] if isinstance(value, list) else value
