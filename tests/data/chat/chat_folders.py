"""Tokenizer folders with chat templates in the styles of four model families."""

import json
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


def write_folder(folder: Path, template: object, as_file: bool = False) -> str:
    """Writes a byte-level tokenizer with a template, and returns its tokenizer.json.

    Args:
        folder: folder to create.
        template: text or named templates of tokenizer_config.json; None for none.
        as_file: write chat_template.jinja instead.
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
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder / "tokenizer.json")


def template_of(style: str, marked: bool) -> str:
    """The template of a style, with `{% generation %}` blocks if marked."""
    tags = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    return STYLES[style].replace("{<}", tags[0]).replace("{>}", tags[1])
