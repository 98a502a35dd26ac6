"""Chat templates: token ids and label masks of conversations."""

import json
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtraining_jax.data.chat.conversation import read_conversation
from mtraining_jax.data.chat.template import ChatTemplate
from mtraining_jax.data.tokenizer import make_tokenizer
from mtraining_jax.tools.corpus.tokenizing import tokenize_corpus
from mtraining_jax.utils.errors import UserError
from tests.data.chat.chat_folders import STYLES, template_of, write_folder
from tests.data.common import error_of, loader_of, section
from tests.data.test_hf_disk import save

WHERE = "a.jsonl, line 7"


def said(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich <&>"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The <sky> 🌦"}}]
TURNS = [
    said("user", "the first\n"),
    said("assistant", "Grüße 👩‍👩‍👧!"),
    said("user", " 中文 or this?"),
    said("assistant", "\n  this, this or that  \n"),
]
WITH_TOOLS = [
    said("system", "be short"),
    said("user", "the weather?"),
    said("assistant", "", tool_calls=[CALL]),
    said("tool", "sun"),
    said("tool", "wind"),
    said("assistant", "It is sunny."),
    said("user", "thanks"),
]
# Trained texts, and CRC-32 of ids (uint32) and assistant_masks (bool) that transformers 5.24.0
# computes by `apply_chat_template(messages, tools, return_assistant_tokens_mask=True)` with the
# templates marked by {% generation %}, on 26 July 2024.
# A line break before an answer is one token with the last one of the prompt.
GOLDEN = {
    "smollm2": (
        TURNS,
        None,
        ["Grüße 👩‍👩‍👧!<|im_end|>", "\n\n  this, this or that  \n<|im_end|>"],
        (4032553245, 3586006367),
    ),
    "qwen2.5": (
        WITH_TOOLS,
        TOOLS,
        [
            '\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich <&>"}}\n'
            "</tool_call><|im_end|>",
            "It is sunny.<|im_end|>",
        ],
        (3735715681, 1096322255),
    ),
    "qwen3": (
        TURNS,
        None,
        ["Grüße 👩‍👩‍👧!<|im_end|>", "<think>\n\n</think>\n\n\n  this, this or that  \n<|im_end|>"],
        (1806807453, 530252924),
    ),
    "llama3": (
        TURNS,
        None,
        ["Grüße 👩‍👩‍👧!<|eot|>", "this, this or that<|eot|>"],
        (352493643, 2856587325),
    ),
}


USER, ANSWER = said("user", "q"), said("assistant", "a")


def chats_of(folder, source, **how):
    return ChatTemplate(make_tokenizer(write_folder(folder, source, **how), "<|endoftext|>"))


@pytest.fixture
def chats(tmp_path):
    """The template of a style."""
    return lambda style: chats_of(tmp_path / style, template_of(style, marked=False))


def encoded(chats, messages, tools=None):
    return chats.encode(read_conversation(messages, tools, WHERE))


def error(chats, messages, tools=None):
    with pytest.raises(UserError) as caught:
        encoded(chats, messages, tools)
    message = str(caught.value)
    assert message.startswith(WHERE) and "\n" not in message and not message.endswith(".")
    return message.removeprefix(WHERE)


def trained_texts(chats, tokens):
    """The texts of runs of trained tokens, with special tokens."""
    edges = np.flatnonzero(np.diff(tokens.trained, prepend=False, append=False))
    decode = chats._tokenizer._backend.decode
    return [
        decode(tokens.ids[a:b].tolist(), skip_special_tokens=False)
        for a, b in edges.reshape(-1, 2).tolist()
    ]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("marked", [True, False])
def test_ids_and_masks_equal_those_of_transformers(tmp_path, style, marked):
    messages, tools, texts, checksums = GOLDEN[style]
    chats = chats_of(tmp_path / "x", template_of(style, marked), as_file=marked)
    tokens = encoded(chats, messages, tools)
    assert trained_texts(chats, tokens) == texts
    found = zlib.crc32(tokens.ids.astype("<u4").tobytes()), zlib.crc32(tokens.trained.tobytes())
    assert found == checksums and tokens.note == ""


def test_a_turn_that_the_template_changes_later_is_not_trained(chats):
    qwen3 = chats("qwen3")
    turns = [said("user", "one"), said("assistant", "A", reasoning_content="since")]
    whole = ["<think>\nsince\n</think>\n\nA<|im_end|>"]
    tokens = encoded(qwen3, turns)
    assert trained_texts(qwen3, tokens) == whole and tokens.note == ""
    # The reasoning of the first turn is lost. `thinking` is another name of reasoning_content.
    longer = [*turns, said("user", "two"), said("assistant", "B", thinking="so")]
    tokens = encoded(qwen3, longer)
    assert trained_texts(qwen3, tokens) == ["<think>\nso\n</think>\n\nB<|im_end|>"]
    assert tokens.note.startswith("conversations with a turn that is not trained because")


def test_a_token_at_the_end_of_the_conversation_is_no_change(tmp_path):
    # As in the template of Phi-3: the end of the text follows the end of the last turn.
    each = chats_of(
        tmp_path / "x",
        "{% for m in messages %}{{ '<|header|>' + m.role + '\n' + m.content + '<|eot|>\n' }}"
        "{% endfor %}{{ '<|header|>assistant\n' if add_generation_prompt else eos_token }}",
    )
    tokens = encoded(each, [USER, ANSWER, USER, said("assistant", "b")])
    assert trained_texts(each, tokens) == ["a<|eot|>", "b<|eot|>\n<|endoftext|>"]
    assert tokens.note == ""
    end = each.end_token(read_conversation([USER], None, WHERE))
    assert each._tokenizer.added_tokens[end].content == "<|eot|>"


def test_weight_zero_excludes_a_message(chats, tmp_path):
    turns = [TURNS[0], TURNS[1] | {"weight": 0}, TURNS[2], TURNS[3] | {"weight": 1}]
    for each in (chats("llama3"), chats_of(tmp_path / "m", template_of("llama3", marked=True))):
        assert trained_texts(each, encoded(each, turns)) == ["this, this or that<|eot|>"]
    assert "message 2 has weight = 0.5; it must be 0" in error(
        each, [TURNS[0], TURNS[1] | {"weight": 0.5}]
    )


def test_forms_of_a_conversation(chats):
    qwen = chats("qwen2.5")
    wanted = encoded(qwen, WITH_TOOLS, TOOLS)
    call = CALL | {"function": CALL["function"] | {"arguments": '{"city": "Zürich <&>"}'}}
    names = {"user": "human", "assistant": "gpt"}
    share_gpt = [
        {"from": names.get(m["role"], m["role"]), "value": m["content"], "id": None}
        | ({"tool_calls": [call]} if "tool_calls" in m else {})
        for m in WITH_TOOLS
    ]
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in WITH_TOOLS]
    for messages in (share_gpt, parts, json.dumps(WITH_TOOLS)):
        for tools in (TOOLS, json.dumps(TOOLS)):
            found = encoded(qwen, messages, tools)
            assert np.array_equal(found.ids, wanted.ids)
            assert np.array_equal(found.trained, wanted.trained)


def test_prompt_and_end_of_turn(chats, tmp_path):
    conversation = read_conversation([said("user", "hi")], None, WHERE)
    for each in (chats("llama3"), chats_of(tmp_path / "m", template_of("llama3", marked=True))):
        assert each.prompt(conversation).endswith("hi<|eot|><|header|>assistant<|header|>\n\n")
        (end,) = [id for id, x in each._tokenizer.added_tokens.items() if x.content == "<|eot|>"]
        assert each.end_token(conversation) == end
    no_end = chats_of(tmp_path / "n", "{{ messages[-1].content }}")
    assert no_end.end_token(conversation) is None


def test_named_templates(tmp_path):
    named = [
        {"name": name, "template": template_of(style, marked=True)}
        for name, style in (("default", "llama3"), ("tool_use", "qwen2.5"))
    ]
    each = chats_of(tmp_path / "a", named)
    assert trained_texts(each, encoded(each, TURNS)) == GOLDEN["llama3"][2]
    assert trained_texts(each, encoded(each, WITH_TOOLS, TOOLS)) == GOLDEN["qwen2.5"][2]
    each = chats_of(tmp_path / "b", named[1:])
    assert trained_texts(each, encoded(each, WITH_TOOLS, TOOLS)) == GOLDEN["qwen2.5"][2]
    assert error(each, TURNS).endswith(
        'no chat template with the name "default"; it has "tool_use"'
    )


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (None, "has no chat template: neither chat_template in tokenizer_config.json nor"),
        ("{% if %}", "tokenizer_config.json: the chat template is not valid (Expected an expres"),
        (3, "tokenizer_config.json: chat_template is not valid"),
    ],
)
def test_missing_and_invalid_templates(tmp_path, source, problem):
    with pytest.raises(UserError) as caught:
        chats_of(tmp_path / "x", source)
    assert problem in str(caught.value)
    with pytest.raises(UserError, match='data.tokenizer = "bytes" has no chat template'):
        ChatTemplate(make_tokenizer("bytes"))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], ": a conversation must be a list with at least one message"),
        ("[{]", ": messages are text that is not JSON (Expecting property name"),
        ([3], ": message 1 must be an object with role and content"),
        ([USER, said("robot", "a")], ': message 2 has the role "robot"; allowed are system, devel'),
        ([said("user", None)], ": message 1 has no content; it must be text"),
        ([said("user", [{"type": "image"}])], ": message 1 has a part that is not text"),
        ([USER], ": no message has the role assistant, so nothing is trained"),
        ([USER, said("assistant", "", tool_calls=[{}])], ": message 2 has a tool call without a"),
        ([USER, ANSWER | {"tool_calls": CALL}], ": message 2 has tool_calls that are not a list"),
        ([USER, ANSWER | {"tool_calls": [CALL]}], " has tool_calls, which the chat template igno"),
        ([USER, ANSWER | {"reasoning": "r"}], " has reasoning_content, which the chat template"),
        ([USER, ANSWER, said("tool", "x")], "(This template has no role tool)"),
    ],
)
def test_invalid_conversations(chats, messages, problem):
    assert problem in error(chats("llama3"), messages)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("<|eot|>' }}", "' }}"), ": message 2: the chat template ends this turn without"),
        (("assistant<|header|>\\n\\n", "assistant<|header|><think>"), "not continue its own"),
        (("content | trim }}{{ '<|eot|>' }}\n", "content[1:] }}{{ '<|eot|>' }}\n"), "drops a part"),
    ],
)
def test_templates_that_hide_what_the_model_generates(tmp_path, change, problem):
    source = template_of("llama3", marked=False)
    assert source.count(change[0])
    each = chats_of(tmp_path / "x", source.replace(*change))
    assert problem in error(each, [USER, ANSWER])


def test_ignored_tools(chats):
    assert error(chats("smollm2"), [USER, ANSWER], TOOLS) == (
        " has tools, which the chat template ignores; remove it from the conversation, or use a "
        "template that renders it"
    )


def test_the_sandbox(tmp_path):
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(3) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
    ):
        each = chats_of(tmp_path / str(len(source)), source)
        assert "unsafe" in error(each, [USER, ANSWER])


ROWS = [{"messages": TURNS}, {"messages": WITH_TOOLS, "tools": TOOLS}, {"messages": TURNS[2:]}]


def write_rows(path, rows):
    """The rows as a file of a source, and the name of the source."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return "jsonl"
    table = pa.Table.from_pylist([{"tools": None} | row for row in rows])
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return "parquet"
    save(path, table, files=1)
    return "hf_disk"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a"])
def test_sources_read_conversations(tmp_path, chats, name):
    qwen = chats("qwen2.5")
    source = write_rows(tmp_path / name, ROWS)
    fields = {
        "source": source,
        "paths": (str(tmp_path / name),),
        "messages_field": "messages",
        "tokenizer": str(tmp_path / "qwen2.5/tokenizer.json"),
        "mode": "pack",
        "seq_len": 128,
    }
    wanted = [encoded(qwen, row["messages"], row.get("tools")) for row in ROWS]
    corpus = section(300, **fields).source_options.open(section(300, **fields), 300)
    assert corpus.stream.take(np.arange(len(corpus.stream))).tolist() == [
        id for tokens in wanted for id in tokens.ids.tolist()
    ]
    loader = loader_of(section(300, **fields), 300, block_size=1)
    # The second conversation is longer than a sequence, and is not cut.
    assert "1 longer than a sequence skipped (up to 320 tokens)" in loader.description
    found = set()
    for _ in range(loader.num_sequences):
        labels = next(loader)["labels"]
        found |= set(labels[labels >= 0].tolist())
    kept = (wanted[0], wanted[2])
    assert found == {id for x in kept for id in x.ids[x.trained].tolist()}
    loader.close()
    error = error_of(300, 1, **fields | {"seq_len": 32})
    assert error.startswith("data.seq_len = 32 is less than the ") and "not split" in error
    write_rows(tmp_path / name, [*ROWS, {"messages": [USER]}])
    where = "line 4" if source == "jsonl" else "row 3"
    assert error_of(300, 1, **fields).endswith(
        f", {where}: no message has the role assistant, so nothing is trained"
    )


def test_conversations_are_pretokenized_with_one_template(tmp_path, chats):
    qwen = chats("qwen2.5")
    write_rows(tmp_path / "a.jsonl", ROWS)
    tokenizer = tmp_path / "qwen2.5/tokenizer.json"
    fields = {"paths": (str(tmp_path / "a.jsonl"),), "tokenizer": str(tokenizer)}
    data = section(300, source="jsonl", messages_field="messages", **fields)
    totals = tokenize_corpus(data, 300, tmp_path / "tokens", processes=1)
    wanted = [encoded(qwen, row["messages"], row.get("tools")) for row in ROWS]
    found = np.load(tmp_path / "tokens/part-00000.npy.mask")
    assert found.tolist() == [bool(x) for tokens in wanted for x in tokens.trained]
    assert totals.trained == found.sum()
    # Parts that one template made are not continued with another.
    (tokenizer.parent / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(UserError, match="tokens was started with checksum of the chat template ="):
        tokenize_corpus(data, 300, tmp_path / "tokens", processes=1)


def test_options_of_conversations(tmp_path):
    fields = {"source": "jsonl", "paths": ("x",), "messages_field": "messages"}
    assert 'data.messages_field = "messages" needs a chat template' in error_of(**fields)
    message = error_of(**fields, tokenizer="x.json", prompt_field="p")
    assert 'messages_field = "messages" excludes data.prompt_field = "p"; remove' in message
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [said("user", "\ud800"), ANSWER]}))
    tokenizer = write_folder(tmp_path / "t", template_of("smollm2", marked=False))
    fields |= {"paths": (str(path),), "tokenizer": tokenizer}
    assert error_of(300, **fields) == f"{path}, line 1 has text that is not valid Unicode"
