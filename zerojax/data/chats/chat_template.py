"""Renders chat templates in Jinja's sandbox, in a separate process with limits.

A template belongs to a downloaded model, so it is untrusted code: it may loop or allocate too much
memory, even inside one C call that no Python signal interrupts. This file is therefore also the
program of a separate process (`python -P chat_template.py`), and imports nothing of zerojax. The
process reads a line of JSON with the template and the limits from its standard input, then a line
for each batch of chats. It writes one line for each chat.

Templates get the same environment as in transformers: trimmed blocks, `break` and `continue`,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, and `{% generation %} ... {%
endgeneration %}` around the assistant's text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MAX_CHARACTERS = 200  # of an error's text
# Keys under which datasets store a model's reasoning; templates read the first one.
REASONING = ("reasoning_content", "thinking", "reasoning")


def line_of_marks(source: str) -> str | None:
    """Returns number and text of the first line of a template that marks answers; None if no line
    marks any.
    """
    for number, line in enumerate(source.splitlines(), 1):
        if found := MARKER.search(line):
            shown = line[max(0, found.start() - 40) : found.end() + 40].strip()
            return f"line {number}: {shown}"
    return None


class TurnError(ValueError):
    """Raised if the position of an assistant's message in the rendered text cannot be found."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of rendering one chat.

    Attributes:
      seconds: maximum processor time; the operating system kills a process that exceeds it.
      characters: maximum number of characters of the rendered text; `prepare_chats` also refuses
        longer chats.
      megabytes: maximum memory, in addition to the process's memory at its start.
    """

    seconds: float = 5.0
    characters: int = 2_000_000
    megabytes: int = 1024


class ChatTemplate:
    """Compiled chat template in Jinja's sandbox.

    Attributes:
      has_markers: whether the template itself marks the assistant's text.
    """

    def __init__(
        self,
        source: str,
        *,
        variables: dict[str, Any] | None = None,
        now: str | None = None,
        limits: Limits | None = None,
    ):
        """Compiles a template.

        Args:
          source: Jinja source of the template.
          variables: variables of the template, such as `bos_token`.
          now: time for `strftime_now`, in ISO format; None uses the current time.
          limits: limits, of which only `characters` is used; the process applies the others.

        Raises:
          Exception: the template is invalid; raised by jinja2.
        """
        self.has_markers = MARKER.search(source) is not None
        self._variables, self._limits = variables or {}, limits or Limits()
        self._written = 0
        self._answers: list[tuple[int, int]] = []
        self._template = self._environment(now).from_string(source)

    def _environment(self, now: str | None) -> Any:
        # Imported lazily, because the package is optional.
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self

        class Generation(jinja2.ext.Extension):
            """Extension `{% generation %}`: records the position of its block in the text."""

            tags = {"generation"}  # noqa: RUF012 - a class attribute, as jinja2 requires

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                call = self.call_method("_note")
                return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

            def _note(self, caller: Callable[[], str]) -> str:
                # All text before this block has been yielded, and counted in `_written`.
                text = caller()
                template._answers.append((template._written, template._written + len(text)))
                return text

        class Names(jinja2.utils.Namespace):
            """Namespace that rejects names with a leading underscore, which give access to
            Python."""

            def __init__(*args: object, **named: object) -> None:
                for name in dict(*args[1:], **named):
                    Names._check(name)
                jinja2.utils.Namespace.__init__(*args, **named)

            def __setitem__(self, name: str, value: object) -> None:
                Names._check(name)
                super().__setitem__(name, value)

            @staticmethod
            def _check(name: object) -> None:
                if str(name).startswith("_"):
                    raise jinja2.exceptions.SecurityError(
                        f"{name!r} is not a valid name for a namespace"
                    )

        def raise_exception(message: Any) -> None:
            raise jinja2.TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            # Jinja's own filter would also escape the characters <, > and &.
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        moment = datetime.datetime.now() if now is None else datetime.datetime.fromisoformat(now)
        made: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, jinja2.ext.loopcontrols],
        )
        made.filters["tojson"] = tojson
        made.globals["namespace"] = Names
        made.globals["dict"] = lambda *args, **named: dict(*args, **named)
        made.globals["raise_exception"] = raise_exception
        made.globals["strftime_now"] = moment.strftime
        return made

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: object = None,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders a chat; returns (text, [start, end) of each answer that the template marks).

        Positions are in characters.

        Raises:
          ValueError: the text has more characters than the limit.
          Exception: raised by the template.
        """
        pieces: list[str] = []
        self._written, self._answers = 0, []
        values = {
            **self._variables,
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        for piece in self._template.generate(values):
            pieces.append(piece)
            self._written += len(piece)
            if self._written > self._limits.characters:
                raise ValueError(f"its output has more than {self._limits.characters} characters")
        return "".join(pieces), self._answers

    def answers(
        self,
        messages: Sequence[dict[str, Any]],
        tools: object = None,
        *,
        turns: Sequence[int] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders a chat, and finds the positions of the assistant's turns in its text.

        If the template has no markers, a turn is located by two renderings: of the messages before
        it with the generation prompt, and of these messages with the turn. The first must be a
        prefix of the second, and the second a prefix of the whole text.

        Args:
          messages: messages, of which at least one is an assistant's.
          tools: tools that the assistant may call.
          turns: indices of the assistant's messages to find; None finds all.

        Returns:
          (text, [start, end) of each of these turns, in characters). With markers and all turns,
          the positions are those of all marked blocks, of which a turn may have several.

        Raises:
          TurnError: the position of a turn is not found; names the turn.
          Exception: raised by the template.
        """
        messages = [_with_reasoning(message) for message in messages]
        text, marked = self.render(messages, tools)
        known = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        turns = known if turns is None else turns
        if not self.has_markers:
            return text, [self._place(messages, tools, turn, text) for turn in turns]
        if len(turns) < len(known) and len(marked) != len(known):
            raise TurnError(
                f"the template has {len(marked)} marks for {len(known)} answers, so the answers "
                "without a loss cannot be found; correct the template's generation marks"
            )
        if len(turns) == len(known):
            return text, marked
        wanted = set(turns)
        return text, [place for turn, place in zip(known, marked, strict=True) if turn in wanted]

    def _place(
        self, messages: Sequence[dict[str, Any]], tools: object, turn: int, text: str
    ) -> tuple[int, int]:
        if turn == 0:
            raise TurnError("message 1 is the assistant's, with no question before it")
        asked, _ = self.render(messages[:turn], tools, add_generation_prompt=True)
        is_last = turn == len(messages) - 1
        told = text if is_last else self.render(messages[: turn + 1], tools)[0]
        if not told.startswith(asked):
            why = "does not begin with the messages before it and the generation prompt"
        elif not text.startswith(told):
            why = "is rendered differently once messages follow it"
        else:
            return len(asked), len(told)
        raise TurnError(f"message {turn + 1}, of the assistant, {why}")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without entries of None; its reasoning text is stored under "thinking"
    (unless the message has this key) and "reasoning_content", which known templates read.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    thought = next((kept[key] for key in REASONING if key in kept), None)
    if thought is not None:
        kept = {"thinking": thought, **kept, "reasoning_content": thought}
    return kept


def in_one_line(error: BaseException) -> str:
    """Formats the text of an error in one line of at most 200 characters."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
    return text or type(error).__name__


@contextlib.contextmanager
def _timed(seconds: float) -> Iterator[None]:
    """Limits this process's processor time in the context; the operating system kills the process
    when the time is used up.

    The signal keeps its default action, so that a long C call is ended as well.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(megabytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    now = pages * resource.getpagesize()
    # On top of what the interpreter has mapped by now.
    resource.setrlimit(resource.RLIMIT_AS, (now + (megabytes << 20),) * 2)


def _answer(template: ChatTemplate, chat: dict[str, Any]) -> dict[str, Any]:
    try:
        found = template.answers(chat["messages"], chat.get("tools"), turns=chat.get("turns"))
    except TurnError as error:
        return {"turn": str(error)}
    except MemoryError:
        return {"error": "the template needs more memory than the limit"}
    except RecursionError:
        return {"error": "the template has infinite recursion"}
    except Exception as error:  # untrusted code may raise anything
        return {"error": in_one_line(error)}
    return {"text": found[0], "answers": found[1]}


def serve(requests: Iterator[str], say: Callable[[dict[str, Any]], None]) -> None:
    """Compiles the template of the first request, and renders the chats of each further request.

    Args:
      requests: lines of JSON: {"source", "variables", "now", "limits"}, then lists of chats
        {"messages", "tools", "turns"}.
      say: function that writes an answer: {"markers": bool}, {"error": text} or, without jinja2,
        {"missing": text}, then for each chat {"text", "answers"}, {"turn": text} or {"error":
        text}.
    """
    about = json.loads(next(requests))
    limits = Limits(**about["limits"])
    try:
        import jinja2.debug  # noqa: F401 - errors would import it after memory is limited
    except ImportError as error:
        say({"missing": str(error)})
        return
    _limit_memory(limits.megabytes)
    try:
        with _timed(limits.seconds):
            template = ChatTemplate(
                about["source"], variables=about["variables"], now=about["now"], limits=limits
            )
    except (Exception, RecursionError) as error:
        say({"error": in_one_line(error)})
        return
    say({"markers": template.has_markers})
    for line in requests:
        for chat in json.loads(line):
            with _timed(limits.seconds):
                found = _answer(template, chat)
            say(found)


def _write_line(value: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(iter(sys.stdin), _write_line)
