"""Chat templates in the manner of published ones, in our own words, and chats for them."""

import re

MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")

CHATML = r"""
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}
{{- message['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# The date in the system's turn, trimmed contents, the first token written by the template.
HEADERS = r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if strftime_now is defined %}
    {{- 'Today: ' + strftime_now('%d %b %Y') + '\n' }}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in rest %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# Another name for the assistant, no system, and an error where roles do not take turns.
TURNS = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
{{- raise_exception('no system turn here') }}
{%- endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('turns must alternate between user and assistant') }}
{%- endif %}
{%- set name = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + name + '\n' }}
{%- if name == 'model' %}
{%- generation %}{{ message['content'] | trim }}{{ '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}
{%- else %}
{{- message['content'] | trim + '<end_of_turn>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}
"""

# What was thought is written behind the last question only, and tools are written as JSON.
THINKING = r"""
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n' }}
    {%- for tool in tools %}
        {%- if tool.function is not defined %}{%- continue %}{%- endif %}
        {{- tool | tojson }}{{- '\n' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- set seen = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set seen.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- set thought = message.reasoning_content | default('') %}
        {%- generation %}
        {%- if loop.index0 > seen.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n' }}{{- call.function | tojson }}{{- '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content }}
        {{- '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "turns": TURNS, "thinking": THINKING}

SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
)
BOS, EOS = SPECIAL[:2]


def unmarked(template: str) -> str:
    """The template without generation marks, which published ones mostly do not have."""
    return MARKS.sub("", template.replace("{%- generation %}", "{{- '' }}")).replace(
        "{%- endgeneration %}", "{{- '' }}"
    )


def _turns(*contents: str) -> list[dict]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <of> a \"city\" & its 'sky'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}

CHATS: dict[str, dict] = {
    "one": {"messages": _turns("What is 2 + 2?", "It is 4.")},
    "two": {"messages": _turns("What is 2 + 2?", "It is 4.", "  And 3 + 3? ", " 6, of course\n")},
    "letters": {
        "messages": _turns("Grüße, 日本! 🙂", "Ωμέγα 🙂🙂 naïve", "<b>&amp;'\"</b>", "fine 🙂")
    },
    "system": {
        "messages": [{"role": "system", "content": "Be brief. "}, *_turns("Who?", "I.", "Why?", "")]
    },
    "open": {"messages": _turns("Hello", "Good day", "Are you there?")},
    "thoughts": {
        "messages": [
            {"role": "user", "content": "Is 7 a prime?"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "2, 3: none divides it"},
            {"role": "user", "content": "And 9?"},
            {"role": "assistant", "content": "No.", "thinking": "3 does", "tool_calls": None},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "How is the weather?"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "content": '{"sky": "blue"}'},
            {"role": "assistant", "content": "The sky is blue."},
        ],
        "tools": [_TOOL, {"name": "of another form"}],
    },
}
