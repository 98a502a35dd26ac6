"""Tokenizer folders with chat templates in the styles of model families."""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|eot|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # not special, as in Qwen3
_MERGES = ("Ġ Ġ", "Ċ Ċ", "t h", "th e", "o r", "a s", "as s", "i s", "ĠĠ ĠĠ", "Ġ t")

# `{<}` and `{>}` enclose what the assistant generates: nothing, or a generation block.
STYLES = {
    # Prints all roles alike; has neither tools nor reasoning.
    "smollm2": """\
{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are small.<|im_end|>\\n' }}
{%- endif %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}{<}{{ message['content'] + '<|im_end|>' }}{>}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    # Tools as JSON; consecutive answers of tools share a message of the user.
    "qwen2.5": """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{<}
        {{- message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}{>}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    # Reasoning only after the last message of the user, and then also if it is empty.
    "qwen3": """\
{%- set ns = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{% set ns.last = messages | length - loop.index %}{% break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}{<}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content | default('') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content + '<|im_end|>' }}{>}
    {%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    # A start token and the date; spaces around contents are lost.
    "llama3": """\
{{- bos_token }}
{%- if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}
{{- '<|header|>system<|header|>\\n\\nToday: ' + date + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('This template has no role ' + message.role) }}
    {%- endif %}
    {{- '<|header|>' + message.role + '<|header|>\\n\\n' }}
    {%- if message.role == 'assistant' %}{<}{{ message.content | trim }}{{ '<|eot|>' }}{>}
    {%- else %}{{ message.content | trim }}{{ '<|eot|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|header|>\\n\\n' }}{% endif %}""",
}

# Styles of models that reason, and of models without a role for the system.
OTHERS = {
    # Channels. Only the last message has its reasoning and the token that ends a generation; tool
    # calls have their reasoning until an answer follows.
    "harmony": """\
{{- '<|im_start|>system<|begin|>Date: ' + strftime_now('%Y-%m-%d') + '<|eot|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set later = namespace(answer=false) %}
        {%- for other in messages[loop.index:] %}
            {%- if other.role == 'assistant' and 'tool_calls' not in other %}
                {%- set later.answer = true %}
            {%- endif %}
        {%- endfor %}
        {%- if message.thinking and not later.answer %}
            {{- '<|im_start|>assistant<|header|>analysis<|begin|>' + message.thinking + '<|eot|>' }}
        {%- endif %}
        {{- '<|im_start|>assistant to=' + message.tool_calls[0].function.name }}
        {{- '<|begin|>' + message.tool_calls[0].function.arguments | tojson + '<|im_end|>' }}
    {%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
        {%- if 'thinking' in message %}
            {{- '<|im_start|>assistant<|header|>analysis<|begin|>' + message.thinking + '<|eot|>' }}
        {%- endif %}
        {{- '<|im_start|>assistant<|header|>final<|begin|>' + message.content + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant<|header|>final<|begin|>' + message.content + '<|eot|>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '<|begin|>' + message.content + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}""",
    # The prompt opens the reasoning, which may be in the content, and earlier messages lose it.
    "thinking": """\
{%- macro shown(message) %}{{ message.content | trim }}{% endmacro %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content, thought = shown(message), message.reasoning_content | default('') %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1].lstrip() %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\n' + thought | trim + '\n</think>\n\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}""",
    # Never renders reasoning; ends the answers of tools only before an answer.
    "deepseek": """\
{{- bos_token }}
{%- set ns = namespace(tool=false) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- set ns.tool = true %}
        {{- '<|header|>' + message.content }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>' + message.content }}
    {%- elif message.tool_calls %}
        {{- '<|im_end|>' + message.tool_calls[0].function.name + eos_token }}
    {%- else %}
        {{- '<|eot|>' if ns.tool else '<|im_end|>' }}
        {{- message.content.split('</think>')[-1] + eos_token }}
        {%- set ns.tool = false %}
    {%- endif %}
{%- endfor %}
{%- if ns.tool %}{{ '<|eot|>' }}{% elif add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}""",
    "gemma": """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate') }}
    {%- endif %}
    {{- '<|im_start|>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
    {{- message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}""",
    # The system's text is in the last message of the user; no prompt precedes an answer.
    "mistral": """\
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- set last = not rest[loop.index:] | selectattr('role', 'equalto', 'user') | list %}
        {{- '<|header|>' }}
        {%- if last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
        {{- message.content + '<|eot|>' }}
    {%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}""",
}


def write_folder(
    folder: Path, template: object, as_file: bool = False, named: Mapping[str, str] | None = None
) -> str:
    """Writes a byte-level tokenizer with a template, and returns its tokenizer.json.

    Args:
        folder: folder to create.
        template: text or named templates of tokenizer_config.json; None for none.
        as_file: write chat_template.jinja instead.
        named: templates of additional_chat_templates.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split()) for merge in _MERGES]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in _SPECIAL])
    tokenizer.add_tokens([AddedToken(x, normalized=False) for x in _TAGS])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"bos_token": {"__type": "AddedToken", "content": "<|begin|>"}}
    settings["eos_token"] = "<|endoftext|>"
    if as_file:
        (folder / "chat_template.jinja").write_text(str(template))
    elif template is not None:
        settings["chat_template"] = template
    for name, source in (named or {}).items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / f"additional_chat_templates/{name}.jinja").write_text(source)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder / "tokenizer.json")


def template_of(style: str, marked: bool) -> str:
    """The template of a style, with `{% generation %}` blocks if marked."""
    tags = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    return STYLES[style].replace("{<}", tags[0]).replace("{>}", tags[1])
