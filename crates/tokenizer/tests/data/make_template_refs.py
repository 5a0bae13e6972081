"""Renders chat templates with Python's jinja2, set up as transformers sets it up.

Made with jinja2 3.1.6:
    python3 -m venv v && v/bin/pip install jinja2==3.1.6
    v/bin/python make_template_refs.py   # writes template_refs.json beside this file

The templates are written for this test, in the formats of model families (the comments name
them) and with the constructs that their templates use. `strftime_now` is left to a unit test,
since its output changes.
"""

import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.sandbox

HERE = pathlib.Path(__file__).parent


class Generation(jinja2.ext.Extension):
    """`{% generation %}` as transformers' tracker renders it: a block of its own scope."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val | tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

# Blocks on lines of their own, without `-`: what trim_blocks and lstrip_blocks are for.
ZEPHYR = """\
{% for message in messages %}
    {% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
    {% elif message['role'] == 'assistant' %}
{% generation %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endgeneration %}
    {% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

# Everything printed as Python prints it, and the filters and methods that templates use.
PYTHON = """\
{{ true }} {{ none }} {{ 1.0 }} {{ 7 // 2 }} {{ 7 / 2 }} {{ 2 ** 3 }} {{ -7 % 3 }} {{ missing }}|
{{ [1, 'a', none, true, 2.5] }} {{ {'k': [1, "it's"]} }} {{ 'a' ~ 1 ~ none }} {{ 'ab' * 2 }}|
{{ 'Ab c'.upper() }} {{ 'Ab'.lower() }} {{ 'ab cd'.title() }} {{ 'abc'.capitalize() }}|
{{ ' x '.strip() }}|{{ 'xxa'.lstrip('x') }}|{{ 'axx'.rstrip('x') }}|{{ 'a,b,,c'.split(',') }}|
{{ 'a b  c'.split() }} {{ 'a-b-c'.split('-', 1) }} {{ 'aXbX'.replace('X', 'y') }} {{ 'abc'.find('c') }}|
{{ {'a': 1}.get('a') }} {{ {'a': 1}.get('b') }} {{ {'a': 1}.get('b', 2) }} {{ {'a': 1}.keys() | list }}|
{{ {'b': 1, 'a': 2} | dictsort }} {{ {'b': 1, 'a': 2}.values() | list }} {{ {'b': 1} | items | list }}|
{{ [3, 1, 2] | sort | join(', ') }} {{ [1, 2, 3] | last }} {{ [1, 2, 3] | first }} {{ [1, 2] + [3] }}|
{{ messages | map(attribute='role') | list }} {{ messages | rejectattr('role', 'equalto', 'user') | list | length }}|
{{ '' | default('d', true) }} {{ nothing | default('e') }} {{ 'x' if false }}|{{ '5' | int + 1 }} {{ 5 | string + '1' }}|
{{ 'abc'[1:] }} {{ 'abc'[::-1] }} {{ 'abc'[-1] }} {{ [1, 2, 3][:-1] }} {{ range(3) | list }} {{ 'b' in 'abc' }} {{ 'k' not in {} }}|
{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{{ loop.cycle('a', 'b') }}{{ ';' if not loop.last }}{% endfor %}|
{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }} {{ loop.previtem is defined }} {{ loop.nextitem is defined }},{% else %}none{% endfor %}|
{% macro show(value, depth=0) -%}{{ '.' * depth }}{% if value is mapping %}{% for k in value %}{{ k }}{{ show(value[k], depth + 1) }}{% endfor %}{% else %}{{ value }}{% endif %}{%- endmacro %}
{{ show({'a': {'b': 1}, 'c': 2}) }}|{{ messages is iterable }} {{ 'a' is string }} {{ 1 is number }} {{ true is boolean }} {{ {} is mapping }} {{ [] is sequence }}|
{% set block %}  kept {% endset %}{{ block | trim | upper }} {{ 'x\\ty' | tojson }} {{ 'a' < 'b' }} {{ 3 > 2 and not false }}|
{%- set ns = namespace(found=false, items=[]) -%}
{% for m in messages if m.role == 'user' %}{% set ns.found = true %}{% set ns.items = ns.items + [m.content] %}{% endfor %}{{ ns.found }} {{ ns.items }}|
{{ [{'a': 1}] | selectattr('a') | list }} {{ 'a\\nb' | indent(2) }} {{ ['a', 'b', 'a'] | unique | list }} {{ '%s' | format('x') }} {{ [1, 2] | sum }}
"""

TOJSON = """\
{{ value | tojson }}
{{ value | tojson(indent=2) }}
{{ value | tojson(ensure_ascii=True, sort_keys=True) }}
{{ value | tojson(separators=(',', ':')) }}
{{ value.empty | tojson(indent=4) }}{{ [[], [[]], {}, [{}]] | tojson(indent=1) }}
"""

VALUE = {
    "z": "<b>&'\"\\/", "text": "naïve 日本 🦙 \u2028 \u007f", "control": "\t\n\r\b\f\u0001",
    "numbers": [0, -1, 1.0, 0.1, 1e-5, 1.5e-7, 1e15, 1e16, 2.5e20, 123456789012345678, -0.0],
    "flags": [True, False, None], "empty": {}, "list": [], "nested": {"b": [{"a": []}], "a": {}},
}

SYSTEM = {"role": "system", "content": " You are terse. "}
USER = {"role": "user", "content": "Hi there "}
ASSISTANT = {"role": "assistant", "content": "Hello!"}
AGAIN = {"role": "user", "content": "Weather in Zürich?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}]}
RESULT = {"role": "tool", "content": "{\"temp\": 21.5}"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny."}
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "The weather <now> & later",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]

CASES = [
    ("chatml", CHATML, [USER, ASSISTANT, AGAIN], {}),
    ("chatml without prompt", CHATML, [SYSTEM, USER], {"add_generation_prompt": False}),
    ("llama 3", LLAMA3, [SYSTEM, USER, ASSISTANT, AGAIN], {}),
    ("llama 3 date", LLAMA3, [USER], {"date_string": "01 Jan 2026"}),
    ("llama 3 tools", LLAMA3, [USER, CALL, RESULT], {"tools": TOOLS}),
    ("llama 3 two calls", LLAMA3, [USER, {**CALL, "tool_calls": CALL["tool_calls"] * 2}], {}),
    ("qwen", QWEN, [SYSTEM, USER, THOUGHT, AGAIN], {"enable_thinking": False}),
    ("qwen tools", QWEN, [USER, THOUGHT, AGAIN, CALL, RESULT, RESULT, THOUGHT], {"tools": TOOLS}),
    ("mistral", MISTRAL, [SYSTEM, USER, ASSISTANT, AGAIN], {}),
    ("mistral tools", MISTRAL, [USER, ASSISTANT, AGAIN], {"tools": TOOLS * 2}),
    ("mistral roles", MISTRAL, [USER, AGAIN], {}),
    ("zephyr", ZEPHYR, [USER, ASSISTANT, AGAIN], {}),
    ("python", PYTHON, [SYSTEM, USER, ASSISTANT], {}),
    ("tojson", TOJSON, [], {"value": VALUE}),
]


def main():
    env = environment()
    cases = []
    for name, template, messages, extra in CASES:
        variables = {"messages": messages, "tools": None, "documents": None,
                     "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", **extra}
        case = {"name": name, "template": template, "messages": messages, "extra": extra}
        try:
            case["rendered"] = env.from_string(template).render(**variables)
        except jinja2.exceptions.TemplateError as error:
            case["refused"] = str(error)
        cases.append(case)
    out = {"made_by": f"jinja2 {jinja2.__version__}, make_template_refs.py", "cases": cases}
    (HERE / "template_refs.json").write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")


main()
