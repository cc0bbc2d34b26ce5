"""Converts records of chats from their published formats to one format."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zerojax.config.display import quoted
from zerojax.config.late_dataclasses import dataclass
from zerojax.data.chats.chat_template import REASONING
from zerojax.runtime.bounded_json import JsonError, loads

COLUMNS = ("messages", "conversations", "prompt", "completion", "tools", "system")
"""Columns that are read from a table of chats."""
ASSISTANT = "assistant"
_FORMS = (
    'a chat is {"messages": [{"role": "user", "content": "..."}, ...]}, {"conversations": '
    '[{"from": "human", "value": "..."}, ...]}, or {"prompt": ..., "completion": ...}'
)
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""{speaker in ShareGPT's format: role for chat templates}."""
_READ = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "weight", "train"),
    *REASONING,
)
"""Keys of a message that templates and zerojax read. Other keys may hold values unknown to JSON."""
_MARKS = ("weight", "train")
"""Keys of a message that exclude an answer from the loss if their value is 0 or false."""


MAX_MESSAGES = 10_000
"""Maximum number of messages of a chat: most templates render each of them for each answer."""


class RecordError(ValueError):
    """Raised if a record is not a chat or cannot be trained on; callers add file and row number."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """One conversation, as messages for a chat template.

    Attributes:
      messages: messages {"role", "content", ...}, in the format of templates.
      tools: tools that the assistant may call; None for none.
      first: index of the first message that may be trained on; earlier ones are the question.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: Any = None
    first: int = 0

    @property
    def turns(self) -> list[int]:
        """Indices of the messages to train on: answers without "weight" 0 or "train" false."""
        return [
            index
            for index, message in enumerate(self.messages)
            if index >= self.first
            and message["role"] == ASSISTANT
            and message.get("weight", 1)
            and message.get("train", True)
        ]

    @property
    def num_characters(self) -> int:
        """Approximate number of characters of the messages, with their keys."""
        return sum(len(str(message)) for message in self.messages)

    def as_request(self) -> dict[str, Any]:
        """Returns the chat as a dict that `TemplateProcess.send` accepts."""
        return {"messages": self.messages, "tools": self.tools, "turns": self.turns}

    def each_answer(self) -> Iterator[Chat]:
        """Yields one chat per answer; each chat ends with its answer and trains only this
        answer."""
        for index in self.turns:
            yield dataclasses.replace(self, messages=self.messages[: index + 1], first=index)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Prompt and completion as plain text, used without a template."""

    prompt: str
    completion: str

    @property
    def num_characters(self) -> int:
        """Number of characters."""
        return len(self.prompt) + len(self.completion)


def check_size(chat: Chat | Pair, limit: int, *, each: bool = False) -> None:
    """Raises if a chat is too long to be rendered or encoded.

    Args:
      chat: the chat.
      limit: maximum number of characters.
      each: whether one text is made for each answer, of which all together count.

    Raises:
      RecordError: the chat is too long.
    """
    size, of = chat.num_characters, ""
    if each and isinstance(chat, Chat):
        sums = list(itertools.accumulate(len(str(message)) for message in chat.messages))
        size, of = sum(sums[turn] for turn in chat.turns), " in one text per answer"
    if size > limit:
        raise RecordError(
            f"the chat has about {size:,} characters{of}, more than {limit:,}; make several chats "
            "of it"
        )


def without_nulls(value: object) -> Any:
    """Returns a value of a table without the nulls in its objects.

    Arrow gives all objects of a column the same keys, and fills missing ones with null.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def chat_of(record: object, columns: Sequence[str] = ()) -> Chat | Pair:
    """Converts a record to a chat, or to a pair of prompt and completion.

    Args:
      record: row of a file, in one of the published formats.
      columns: names of all columns of the record's table, for error messages; the record itself has
        only those in `COLUMNS`.

    Raises:
      RecordError: the record is not a chat, is empty, or has no answer.
    """
    if not isinstance(record, Mapping):
        raise RecordError(f"{quoted(record)} is not an object; {_FORMS}")
    record = {key: value for key, value in record.items() if value is not None}
    tools, system = _tools(record.get("tools")), record.get("system")
    for name in ("messages", "conversations"):
        if name in record:
            messages = _with_system(system, _messages(record[name], name))
            return _checked(Chat(messages=messages, tools=tools))
    if "prompt" in record and "completion" in record:
        return _prompt_and_completion(record["prompt"], record["completion"], tools, system)
    of = f" of the columns {sorted(columns)[:8]}" if columns else ""
    raise RecordError(f"the row has the keys {sorted(map(str, record))[:8]}{of}; {_FORMS}")


def _with_system(
    system: object, messages: tuple[Mapping[str, Any], ...]
) -> tuple[Mapping[str, Any], ...]:
    """Puts the text `system` before `messages`, unless they already begin with it."""
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise RecordError(f"the key system is {quoted(system)}, not text; make it text")
    if messages[0]["role"] != "system":
        return ({"role": "system", "content": system}, *messages)
    if messages[0].get("content") != system:
        raise RecordError(
            f"the key system is {quoted(system)}, but the first message, with role system, has the "
            f"content {quoted(messages[0].get('content'))}; remove one of them"
        )
    return messages


def _prompt_and_completion(
    prompt: object, completion: object, tools: object, system: object
) -> Chat | Pair:
    if isinstance(prompt, str) and isinstance(completion, str):
        if system:
            raise RecordError(
                f"the key system is {quoted(system)}, but a prompt of plain text has no "
                "template, so it has "
                "no position; write it into the prompt, or make both lists of messages"
            )
        if not completion:
            raise RecordError("the completion is empty; leave the row out, or write a completion")
        return Pair(prompt=prompt, completion=completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RecordError(
            "one of prompt and completion is text and the other is not; make both text, or both "
            "lists of messages"
        )
    asked = _with_system(system, _messages(prompt, "prompt"))
    told = _messages(completion, "completion")
    return _checked(Chat(messages=(*asked, *told), tools=tools, first=len(asked)))


def _checked(chat: Chat) -> Chat:
    if not any(message["role"] == ASSISTANT for message in chat.messages[chat.first :]):
        roles = sorted({message["role"] for message in chat.messages})
        raise RecordError(
            f"no message has role 'assistant' (the roles are {', '.join(roles)}), so there is "
            "nothing to learn; leave the row out, or give the answers role 'assistant'"
        )
    if not chat.turns:
        raise RecordError(
            "every answer has weight 0 or train false, so there is nothing to learn; leave the row "
            "out, or give an answer weight 1"
        )
    for index in chat.turns:
        message = chat.messages[index]
        content = message.get("content")
        if isinstance(content, list):
            content = any(part["text"] for part in content)
        if not content and not any(message.get(key) for key in ("tool_calls", *REASONING)):
            raise RecordError(
                f"message {index + 1}, of the assistant, is empty; leave the row out, or write an "
                "answer"
            )
    return chat


def _messages(value: object, name: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list):
        raise RecordError(f"the {name} are {quoted(value)}, which is not a list; {_FORMS}")
    if len(value) > MAX_MESSAGES:
        raise RecordError(
            f"the list of {name} has {len(value):,} entries, more than {MAX_MESSAGES:,}; make "
            "several chats of it"
        )
    if not value:
        raise RecordError(f"the list of {name} is empty; leave the row out, or write at least two")
    return tuple(_message(item, number, name) for number, item in enumerate(value, start=1))


def _message(item: object, number: int, name: str) -> Mapping[str, Any]:
    where = f"entry {number} of {name}"
    if not isinstance(item, Mapping):
        raise RecordError(f"{where} is {quoted(item)}, which is not an object; {_FORMS}")
    item = {key: value for key, value in item.items() if value is not None}
    if "from" in item and "role" not in item:
        role = _ROLES.get(item["from"]) if isinstance(item["from"], str) else None
        if role is None:
            raise RecordError(
                f"{where} has {quoted(item['from'])} for the key 'from'; known values are "
                f"{', '.join(_ROLES)}: rename it"
            )
        marks = {key: item[key] for key in _MARKS if key in item}
        item = {"role": role, "content": item.get("value"), **marks}
    if not isinstance(item.get("role"), str) or not item["role"]:
        raise RecordError(f"{where} has no role; {_FORMS}")
    # A key that nobody reads is dropped if JSON cannot hold its value.
    item = {key: value for key, value in item.items() if key in _READ or _foreign(value) is None}
    for key, value in item.items():
        _check_json(value, f"{where}: {key}")
    _check_marks(item, where)
    content = item.get("content")
    if content is None and item.get("tool_calls"):
        return item
    is_text = isinstance(content, str) or (
        isinstance(content, list) and all(_is_text_part(part) for part in content)
    )
    if not is_text:
        raise RecordError(
            f"{where} has the content {quoted(content)}; it must be text, or a list of "
            '{"type": "text", "text": "..."}: images and sounds are not trained on'
        )
    return item


def _check_json(value: object, where: str) -> None:
    found = _foreign(value)
    if found is not None:
        path, held = found
        raise RecordError(
            f"{where}{path} is {quoted(held)}, which JSON cannot hold; make it text, or leave the "
            "row out"
        )


def _foreign(value: object) -> tuple[str, Any] | None:
    """Finds the first part of a value that JSON cannot represent; returns (path, value) or None.

    Tables can contain such values: dates, bytes, decimals, maps and numbers that are not finite.
    """
    if isinstance(value, Mapping):
        parts = [(f".{key}", item) for key, item in value.items()]
    elif isinstance(value, list):
        parts = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        is_number = isinstance(value, float) and math.isfinite(value)
        return None if value is None or is_number or isinstance(value, str | int) else ("", value)
    found = ((path, _foreign(item)) for path, item in parts)
    return next(((path + inner[0], inner[1]) for path, inner in found if inner), None)


def _check_marks(message: Mapping[str, Any], where: str) -> None:
    """Checks the keys of a message that exclude an answer from the loss."""
    for key in _MARKS:
        value = message.get(key)
        is_known = type(value) is bool if key == "train" else type(value) in (int, float)
        if key in message and not (is_known and value in (0, 1)):
            known = "true or false" if key == "train" else "0 or 1"
            raise RecordError(f"{where} has {key}={quoted(value)}; only {known} is supported")
        if value and message["role"] != ASSISTANT:
            raise RecordError(
                f"{where}, of role {quoted(message['role'])}, has {key}={quoted(value)}, but only "
                f"messages of the assistant are trained on; remove {key}"
            )


def _is_text_part(part: Mapping[str, Any]) -> bool:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _tools(value: object) -> Any:
    """Returns the tools of a record as a list. Some data sets store them as JSON text, because
    tables have no such type."""
    if value is None or value == "" or value == []:
        return None
    _check_json(value, "the tools")
    if isinstance(value, str):
        try:
            value = loads(value, finite=False)
        except JsonError as error:
            raise RecordError(
                f"the text of tools {error.what}; make them a list of objects"
            ) from error
    if not isinstance(value, list):
        raise RecordError(f"the key tools is {quoted(value)}; make it a list of objects")
    return value or None
