"""Tokens as a model was trained on: how texts begin and end, by tokenizer and `data.bos`.

Ids are those of `AutoTokenizer` in transformers 5.24.0 for the same folders, with a config.json of
the model type llama, mistral, gemma3_text, qwen2 or gpt2.
"""

import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from mtraining_jax.cli.inspect_data import main as inspect_data
from mtraining_jax.config.load import with_bos
from mtraining_jax.data.tokenizer import HuggingFaceTokenizer, make_tokenizer
from mtraining_jax.tools.corpus.tokenizing import tokenize_corpus
from mtraining_jax.tools.evaluate.tasks import make_tasks
from mtraining_jax.tools.evaluate.tasks.records import iterate_records, read_text
from mtraining_jax.utils.errors import UserError
from tests.data.common import error_of, loader_of, section, sequences
from tests.data.tokenizer_folders import write_tokenizer
from tests.training.common import tiny_config

IDS = {
    ("llama3", "hello hello"): [262, 259, 220, 259],
    ("llama3", ""): [262],
    ("llama2", "hello hello"): [1, 259, 272, 259, 272],
    # Of the model type mistral: for llama, transformers replaces the prefix by another rule.
    ("llama2", " hello"): [1, 268, 272],
    ("llama2", "<s>hello"): [1, 1, 259, 272],
    ("gemma3", "hello hello"): [2, 273, 260, 273],
    ("gemma3", "<bos>hello<eos>"): [2, 2, 273, 1],
    ("qwen2", "hello e\u0301"): [259, 220, 127, 102],
    ("qwen2", ""): [],
    ("gpt2", "a <|endoftext|> hello"): [64, 220, 262, 220, 259],
}
VOCAB = 275  # of llama2
TEXTS = ["hello", "he", "", "hello hello"]


@pytest.fixture
def llama2(tmp_path):
    return write_tokenizer(tmp_path / "llama2", "llama2")


def jsonl(folder, texts=TEXTS, **fields):
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text, "prompt": "he"}) + "\n" for text in texts))
    return {"source": "jsonl", "paths": (str(path),), "vocab_size": VOCAB} | fields


def stream(vocab_size=VOCAB, **fields):
    """All ids of a section, and the corpus."""
    data = section(vocab_size, **fields)
    corpus = data.source_options.open(data, vocab_size)
    return corpus.stream.take(np.arange(len(corpus.stream))).tolist(), corpus


# ---- one text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, text", IDS)
def test_ids_are_those_of_transformers(tmp_path, kind, text):
    tokenizer = make_tokenizer(write_tokenizer(tmp_path, kind), eos=0)
    ids = IDS[kind, text]
    assert tokenizer.encode(text).tolist() == ids
    assert tokenizer.encode(text, bos=False).tolist() == ids[len(tokenizer.bos) :]


@pytest.mark.parametrize(
    "kind, settings, text, ids",
    [
        # Ignored if there is a tokenizer.json.
        ("gpt2", {"add_bos_token": True}, "he", [256]),
        ("llama3", {"add_bos_token": False, "add_eos_token": True}, "he", [262, 256]),
        # Tokens that tokenizer.json lacks.
        ("llama3", {"bos_token": "<|x|>"}, "he<|x|>he", [262, 256, 264, 256]),
        ("qwen2", {"extra_special_tokens": ["<|x|>"]}, "he<|x|>", [256, 265]),
        ("qwen2", {"additional_special_tokens": ["<|x|>"]}, "he<|x|>", [256, 265]),
        ("llama3", {"extra_special_tokens": {"image_token": "<|x|>"}}, "<|x|>", [262, 264]),
        ("llama3", {"image_token": "<|x|>"}, "<|x|>", [262, 264]),
        (
            "llama3",
            {"unk_token": {"content": "<|x|>", "lstrip": True}},
            "he <|x|>",
            [262, 256, 264],
        ),
        (
            "qwen2",
            {"added_tokens_decoder": {"265": {"content": "ello", "lstrip": True}}},
            "h ello",
            [71, 265],
        ),
        # Other flags of a token that it has.
        (
            "qwen2",
            {"added_tokens_decoder": {"262": {"content": "<|endoftext|>", "lstrip": True}}},
            "he <|endoftext|>",
            [256, 262],
        ),
        (
            "gpt2",
            {"split_special_tokens": True},
            "<|endoftext|>",
            [27, 91, 68, 77, 67, 78, 69, 83, 68, 87, 83, 91, 29],
        ),  # fmt: skip
        ("gpt2", {"add_prefix_space": True}, "hello", [220, 259]),
    ],
)
def test_tokenizer_config_counts_as_in_transformers(tmp_path, kind, settings, text, ids):
    tokenizer = make_tokenizer(write_tokenizer(tmp_path / "a", kind, **settings), eos=0)
    assert tokenizer.encode(text).tolist() == ids
    plain = make_tokenizer(write_tokenizer(tmp_path / "b", kind), eos=0)
    changes = not {"add_bos_token"} & settings.keys()
    assert (tokenizer.checksum != plain.checksum) == changes
    # Folders of token files of earlier versions have this one.
    assert plain.checksum == zlib.crc32(Path(plain.name).read_bytes())


@pytest.mark.parametrize("decoder", [None, {}])
def test_special_tokens_map_counts_as_in_transformers(tmp_path, decoder):
    """In older folders, without added_tokens_decoder, it overrides tokenizer_config.json."""
    settings = {} if decoder is None else {"added_tokens_decoder": decoder}
    path = write_tokenizer(tmp_path, "llama3", bos_token=None, eos_token="<|x|>", **settings)
    end = {"content": "<|end_of_text|>", "lstrip": False, "normalized": False}
    names = {"bos_token": "<|begin_of_text|>", "eos_token": end, "pad_token": "<|y|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = HuggingFaceTokenizer(path)
    if decoder is None:
        assert tokenizer.special_tokens == names | {"eos_token": "<|end_of_text|>"}
        assert tokenizer.encode("he<|y|>").tolist() == [262, 256, 264]
    else:
        assert tokenizer.special_tokens == {"eos_token": "<|x|>"}
        assert tokenizer.encode("he<|x|>").tolist() == [262, 256, 264]


@pytest.mark.parametrize("bos, ids", [(None, [1]), (False, []), ("</s>", [2]), (7, [7])])
def test_data_bos_overrides_the_tokenizer(llama2, bos, ids):
    tokenizer = make_tokenizer(llama2, bos=bos)
    assert tokenizer.encode("he").tolist() == [*ids, 259, 269]
    assert tokenizer.usual_bos == (1,)


def test_several_ids_and_other_post_processors(tmp_path):
    name = write_tokenizer(tmp_path, "llama2", post="<s> <unk> $A </s>")
    assert make_tokenizer(name).encode("he").tolist() == [1, 0, 259, 269]
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for kind in ("BertProcessing", "RobertaProcessing"):
        processor = {"type": kind, "cls": ["<s>", 1], "sep": ["</s>", 2]}
        more = {"trim_offsets": False, "add_prefix_space": False}
        processor |= more if kind == "RobertaProcessing" else {}
        (tmp_path / "tokenizer.json").write_text(
            json.dumps(content | {"post_processor": processor})
        )
        assert make_tokenizer(name).encode("he").tolist() == [1, 259, 269]


# ---- documents ---------------------------------------------------------------------------------


@pytest.mark.parametrize("post", ["", "<s> $A </s>"])
def test_each_document_begins_with_bos_and_ends_with_one_eos(tmp_path, post):
    name = write_tokenizer(tmp_path / "t", "llama2", post)
    fields = jsonl(tmp_path, tokenizer=name, seq_len=8)
    ids, corpus = stream(**fields)
    # An empty text has no tokens.
    assert ids == [1, 259, 272, 2, 1, 259, 269, 2, 1, 259, 272, 259, 272, 2]
    assert corpus.summary == (
        "4 documents, 14 tokens, 1 without content (empty or null) skipped, "
        "documents begin with <s> (1)"
    )
    batch = next(loader_of(section(**fields, mode="pack", batch_size=2), VOCAB, block_size=4))
    assert batch["tokens"].ravel().tolist().count(1) == 3
    assert not np.any(batch["labels"] == 1)  # an input only
    assert sequences(**fields | {"mode": "exact", "seq_len": 3})[0] == [
        [1, 259, 272],
        [1, 259, 269],
    ]


def test_documents_without_bos(tmp_path, llama2):
    fields = jsonl(tmp_path, ["he"], tokenizer=llama2)
    ids, corpus = stream(**fields, bos=False)
    assert ids == [259, 269, 2]
    assert corpus.summary.endswith(", documents begin without a beginning-of-sequence token")
    assert stream(**fields, bos="<unk>")[0] == [0, 259, 269, 2]
    for bos, sentence in {
        "<x>": f'data.bos = "<x>" is not a token of data.tokenizer = "{llama2}"',
        300: "data.bos = 300 is outside the vocabulary: model.vocab_size = 275",
        True: "data.bos = true is not allowed: it must be false or an integer (at least 0) or a no",
    }.items():
        with pytest.raises(UserError, match=re.escape(sentence)):
            stream(**fields, bos=bos)


def test_a_prompt_begins_with_bos_which_is_not_trained(tmp_path, llama2):
    ids, corpus = stream(**jsonl(tmp_path, ["", "llo"], tokenizer=llama2, prompt_field="prompt"))
    assert ids == [1, 259, 269, 2, 1, 259, 272, 2]
    assert corpus.trained is not None
    assert np.flatnonzero(corpus.trained(np.arange(8))).tolist() == [6, 7]


def test_inspect_data_shows_it(tmp_path, llama2, capsys):
    path = jsonl(tmp_path, ["hello"])["paths"][0]
    options = ["--data.source=jsonl", f'--data.paths=["{path}"]', f"--data.tokenizer={llama2}"]
    options += ["--data.mode=pack", "--data.seq_len=512", "--model.vocab_size=512"]
    assert inspect_data(["--config=tiny", *options]) == 0
    lines = capsys.readouterr().out
    assert "4 tokens, documents begin with <s> (1)" in lines
    assert '4 tokens from 0: <begin> "hello" <end>' in lines
    assert inspect_data(["--config=tiny", *options, "--data.bos=false"]) == 0
    lines = capsys.readouterr().out
    assert "documents begin without a" in lines and '3 tokens from 0: "hello" <end>' in lines


def test_only_a_text_with_an_id_beyond_the_model_fails(tmp_path):
    name = write_tokenizer(tmp_path, "gemma3", image_token="<image>")
    assert make_tokenizer(name).vocab_size == 277
    fields = {"source": "text", "paths": (str(tmp_path / "*.txt"),), "tokenizer": name}
    (tmp_path / "a.txt").write_text("hello")
    assert stream(276, **fields)[0] == [2, 273, 1]
    (tmp_path / "b.txt").write_text("he<image>")
    assert error_of(276, **fields) == (
        f"{tmp_path / 'b.txt'}: token id 276 at position 2 is outside the vocabulary (0 to 275, "
        "from model.vocab_size)"
    )
    (tmp_path / "b.txt").unlink()
    assert "data.eos = 1 of data.tokenizer = " in error_of(1, **fields)
    assert "data.bos = 2 of data.tokenizer = " in error_of(2, **fields)


# ---- token files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def section_of_folder(tmp_path_factory):
    """The section that `folder` was made from, and the original of that folder."""
    parent = tmp_path_factory.mktemp("bos")
    fields = jsonl(parent, tokenizer=write_tokenizer(parent / "llama2", "llama2"))
    tokenize_corpus(section(**fields), VOCAB, parent / "out", 1)
    return fields, parent / "out"


@pytest.fixture
def folder(section_of_folder, tmp_path):
    """A folder of token files."""
    return shutil.copytree(section_of_folder[1], tmp_path / "out")


def without_record(folder):
    """Makes the folder one of an earlier version."""
    path = folder / "token_parts.json"
    known = json.loads(path.read_text())
    del known["identity"]["data.bos"]
    path.write_text(json.dumps(known))


def test_token_files_know_how_documents_begin(section_of_folder, folder):
    made_from = section_of_folder[0]
    fields = {"source": "tokens", "paths": (str(folder),), "vocab_size": VOCAB}
    ids, corpus = stream(**fields)
    assert ids == stream(**made_from)[0]
    assert corpus.summary.endswith("14 tokens, documents begin with (1)")
    assert stream(**fields, bos=1)[0] == ids
    assert error_of(**fields, bos=False) == (
        f'data.bos = false, but the documents of data.paths = ["{folder}"] begin with (1); remove '
        "data.bos, or tokenize the text again"
    )
    with pytest.raises(UserError, match=r"started with data.bos = \[1\], but now it is \[\]: cho"):
        tokenize_corpus(section(**made_from, bos=False), VOCAB, folder, 1)
    without_record(folder)
    assert stream(**fields)[1].summary.endswith("begin without a beginning-of-sequence token")


def test_parts_must_begin_alike(tmp_path, folder, llama2):
    text = {"source": "jsonl", "paths": list(jsonl(tmp_path)["paths"])}
    parts = {"a": text, "b": {"source": "tokens", "paths": [str(folder)]}}
    fields = {"source": "mixture", "parts": parts, "tokenizer": llama2, "vocab_size": VOCAB}
    loader_of(section(**fields, mode="pack"), VOCAB, block_size=4).close()
    without_record(folder)
    assert error_of(**fields, mode="pack", block_size=4) == (
        "the documents of data.parts.a begin with (1) and of data.parts.b begin without a "
        "beginning-of-sequence token; tokenize all with the same data.bos"
    )
    loader_of(section(**fields, bos=False, mode="pack"), VOCAB, block_size=4).close()


# ---- runs --------------------------------------------------------------------------------------


def test_a_run_keeps_the_beginning_of_its_checkpoint_or_token_files(tmp_path, folder, llama2):
    text = jsonl(tmp_path, tokenizer=llama2)
    del text["vocab_size"]
    model = {"vocab_size": VOCAB}
    of_text = tiny_config(tmp_path / "a", data=text, model=model)
    assert with_bos(of_text).data.bos is None
    assert with_bos(of_text, {"data": {}}).data.bos is False  # an older checkpoint
    assert with_bos(of_text, {"data": {"bos": None}}).data.bos is None
    assert with_bos(of_text, {"data": {"bos": "</s>"}}).data.bos == "</s>"
    given = tiny_config(tmp_path / "a", data=text | {"bos": 1}, model=model)
    assert with_bos(given, {"data": {}}).data.bos == 1
    tokens = {"source": "tokens", "paths": [str(folder)]}
    of_tokens = tiny_config(
        tmp_path / "a", data=text, model=model, eval={"interval": 1, "data": tokens}
    )
    assert with_bos(of_tokens).eval.data.bos == 1
    without_record(folder)
    assert with_bos(of_tokens, {"data": {}}).eval.data.bos is False
    chats = tiny_config(tmp_path / "a", data=text | {"messages_field": "m"}, model=model)
    assert with_bos(chats, {"data": {}}).data.bos is None


def test_the_position_in_the_data_needs_the_same_beginning(tmp_path, llama2):
    fields = jsonl(tmp_path, tokenizer=llama2)
    del fields["vocab_size"]
    loader = loader_of(section(VOCAB, **fields), VOCAB)
    state = loader.get_state()
    loader.close()
    assert state["identity"]["data.bos"] == [1]
    del state["identity"]["data.bos"]
    with pytest.raises(UserError, match=r"had data.bos = \[\], but this run has \[1\]: resume wit"):
        loader.set_state(state)


# ---- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["needle", "passkey", "ruler_niah_single_1", "ruler_vt"])
def test_prompts_of_tasks_begin_with_bos_and_fit_with_it(tmp_path, name):
    tokenizer = make_tokenizer(write_tokenizer(tmp_path, "llama3"))
    (task,) = make_tasks([name], {})
    sample = task.sample(4096, 0, 0, tokenizer)
    assert sample.prompt_ids.tolist() == tokenizer.encode(sample.prompt).tolist()
    assert sample.prompt_ids.tolist().count(262) == 1
    assert len(sample.prompt_ids) + sample.max_new_tokens <= 4096
    if sample.answer_ids is not None:
        whole = tokenizer.encode(sample.prompt + sample.answer)
        assert [*sample.prompt_ids, *sample.answer_ids] == whole.tolist()


def test_a_document_begins_with_bos_which_counts(tmp_path):
    tokenizer = make_tokenizer(write_tokenizer(tmp_path / "t", "llama3"))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    (task,) = make_tasks(["documents"], {"documents": str(tmp_path / "a.txt")})
    assert task.count(tokenizer, 4) == 1 and task.count(tokenizer, 5) == 0
    assert task.sample(4, 0, 0, tokenizer).ids.tolist() == [262, 64, 65, 66]


def test_byte_order_marks_are_dropped(tmp_path, llama2):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfhe")
    assert stream(source="text", paths=(str(path),), tokenizer=llama2)[0] == [1, 259, 269, 2]
    assert read_text(path, "option") == "he"
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "he"}\n')
    assert [x for _, x in iterate_records(path, "option", ("prompt",))] == [{"prompt": "he"}]
