"""Published data sets, from small files in their format: prompts, truncation, scores, errors."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from mtraining_jax.data.tokenizer import ByteTokenizer
from mtraining_jax.tools.evaluate.tasks import GROUPS, make_tasks
from mtraining_jax.tools.evaluate.tasks.metrics import best, edit_similarity, overlap_f1, words_f1
from mtraining_jax.tools.evaluate.tasks.published.infinitebench import InfiniteBench
from mtraining_jax.tools.evaluate.tasks.published.longbench import (
    LongBench,
    LongBenchV2,
    classification,
)
from mtraining_jax.tools.evaluate.tasks.published.rouge import rouge_l, rouge_l_sum
from mtraining_jax.tools.evaluate.tasks.published.task import PublishedTask
from mtraining_jax.utils.errors import UserError

BYTES = ByteTokenizer()
TEXT = "The story begins. " * 40
OPTIONS = ["first one", "second one", "third one", "fourth one"]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def infinitebench(folder, part, **fields):
    record = {"id": 0, "context": TEXT, "input": "What?", "answer": ["x"], "options": []}
    write(folder / f"{part}.jsonl", record | fields)
    (task,) = make_tasks([f"infinitebench_{part}"], {"infinitebench": str(folder)})
    length = 2000 + InfiniteBench.parts[part].max_new_tokens
    return task, task.sample(length, 0, 0, BYTES)


@pytest.mark.parametrize("task", [InfiniteBench, LongBench, LongBenchV2])
def test_every_part_has_a_template(task):
    name = f"{task.family}.json"
    path = Path(inspect.getfile(PublishedTask)).with_name(name)
    assert json.loads(path.read_text()).keys() == task.parts.keys()
    if task is not LongBenchV2:
        assert [f"{task.family}_{part}" for part in task.parts] == list(GROUPS[task.family])


@pytest.mark.parametrize(
    ("part", "fields", "end", "right", "wrong"),
    [
        ("passkey", {"answer": ["71432"]}, "The pass key is", " 71432. R", " 7143. 71432"),
        ("number_string", {"answer": ["00123"]}, "of digits is", " 00123", "123"),
        ("kv_retrieval", {"answer": "a-1"}, "What?", ' "a-1".', "a-12"),
        ("longdialogue_qa_eng", {"answer": ["ACE", "B"]}, "likely", " Ace.", "Face"),
        ("longbook_qa_eng", {"answer": ["The red car"]}, "Answer:", "red car!", "blue"),
        ("longbook_qa_chn", {"answer": ["商老太"]}, "答案：", "商老太。", "张"),
        ("longbook_sum_eng", {"answer": ["A b c.\nD e."]}, "Summary:", "a b c\nd e", "x y"),
        ("math_find", {"input": "The largest number of it", "answer": [88]}, "it", "88,", "8"),
        ("math_calc", {"answer": [[5, 6, 7, 8]]}, "Values:", "[5, 6, 7, 8]", "1, 5"),
        ("code_run", {"input": "func_3(-7)", "answer": [-4]}, "func_3(-7) is", "is -4.", "4"),
    ],
)
def test_a_part_of_infinitebench(tmp_path, part, fields, end, right, wrong):
    task, sample = infinitebench(tmp_path, part, **fields)
    assert TEXT in sample.prompt and sample.prompt.endswith(end) and not sample.cut_tokens
    assert task.score(sample, right) == 1 and task.score(sample, wrong) == 0
    assert task.count(BYTES, 300) == 1


def test_prompts_of_infinitebench_parts(tmp_path):
    _, sample = infinitebench(tmp_path, "math_find", input="The 2nd largest number of it")
    assert sample.prompt.startswith("What is the 2nd largest number in the following list?")
    _, sample = infinitebench(tmp_path, "code_run", input="of func_12(3).", answer=[1])
    assert sample.prompt.startswith("There is a function called func_12 in")
    task, sample = infinitebench(tmp_path, "math_calc", answer=[5, 6, 7, 8])
    assert task.score(sample, "5 6 8 8") == 0.5
    long = "9" * 5000  # more digits than Python converts
    assert task.score(sample, f"[05, 6, {long}, 8]") == 0.5
    with pytest.raises(UserError, match='the input "none" has no "func_'):
        infinitebench(tmp_path, "code_run", input="none")


@pytest.mark.parametrize("answer", [["second one"], "second one", ["second one", "B"]])
def test_options_of_infinitebench(tmp_path, answer):
    task, sample = infinitebench(tmp_path, "longbook_choice_eng", answer=answer, options=OPTIONS)
    assert "C. third one" in sample.prompt and sample.references == ("second one", "B")
    right = ("B", " B. x", "second one", "I say the answer is: B", "Hm B", "the answer is second")
    assert [task.score(sample, text) for text in right] == [1, 1, 1, 1, 1, 0]
    wrong = ("", "A", "I say the answer is: C", "nothing")
    assert not any(task.score(sample, text) for text in wrong)
    task, sample = infinitebench(tmp_path, "code_debug", answer=answer, options=OPTIONS)
    answers = {" B.": 1, "answer is: `B": 1, "answer is: A": 0, "B": 0, "A.": 0}
    assert {text: task.score(sample, text) for text in answers} == answers
    assert task.score(sample, "The error is: second one") == 1


def test_invalid_options(tmp_path):
    with pytest.raises(UserError, match="a record has 3 options; it must have 4"):
        infinitebench(tmp_path, "code_debug", answer="first one", options=OPTIONS[:3])
    with pytest.raises(UserError, match='the answer "fifth" is not an option'):
        infinitebench(tmp_path, "code_debug", answer="fifth", options=OPTIONS)


def test_a_long_prompt_loses_its_middle(tmp_path):
    task, whole = infinitebench(tmp_path, "passkey")
    cut = task.sample(306, 0, 0, BYTES)
    assert len(cut.prompt_ids) == 300 and cut.cut_tokens == len(whole.prompt_ids) - 300
    assert cut.prompt == whole.prompt[:150] + whole.prompt[-150:]
    np.testing.assert_array_equal(cut.prompt_ids, BYTES.encode(cut.prompt))
    with pytest.raises(UserError, match="length 7 is too short .* take 8 tokens"):
        task.sample(7, 0, 0, BYTES)


def longbench(folder, part, **fields):
    record = {"input": "What?", "context": TEXT, "answers": ["x"], "all_classes": None}
    write(folder / f"{part}.jsonl", record, record | fields)
    (task,) = make_tasks([f"longbench_{part}"], {"longbench": str(folder)})
    return task, task.sample(4000, 1, 0, BYTES)


@pytest.mark.parametrize(
    ("part", "fields", "answers"),
    [
        ("hotpotqa", {"answers": ["The Cat", "a dog"]}, {"dog": 1, "one cat": 2 / 3, "cow": 0}),
        ("triviaqa", {"answers": ["cat"]}, {"\ncat\nQuestion: dog": 1, "dog\ncat": 0}),
        ("trec", {"answers": ["b"], "all_classes": ["a", "b", "c"]}, {"b": 1, "a b": 0.5, "c": 0}),
        ("passage_count", {"answers": ["7"]}, {"7": 1, "7 or 8": 0.5, "none": 0}),
        ("passage_retrieval_en", {"answers": ["Paragraph 12"]}, {"Paragraph 12": 1, "1": 0}),
        ("passage_retrieval_zh", {"answers": ["段落3"]}, {"段落3": 1, "4": 0}),
        ("lcc", {"answers": ["x = 1"]}, {"\n# no\nx = 1\ny": 1, "`": 0}),
        ("gov_report", {"answers": ["a b. c d."]}, {"": 0, "x y.": 0}),
    ],
)
def test_a_part_of_longbench(tmp_path, part, fields, answers):
    task, sample = longbench(tmp_path, part, **fields)
    assert TEXT in sample.prompt and sample.references == tuple(fields["answers"])
    for answer, score in answers.items():
        assert task.score(sample, answer) == pytest.approx(score, abs=1e-12), answer


def test_classes_with_a_name_that_is_part_of_the_right_one():
    classes = ["place", "other place", "food"]
    assert classification("other place", "other place", classes) == 1
    assert classification("other place", "place", classes) == 0.5


def test_longbench_v2(tmp_path):
    record = {"context": f"\n{TEXT}", "question": "Why? ", "answer": "C"}
    record |= {f"choice_{letter}": f"because {letter}" for letter in "ABCD"}
    (tmp_path / "data.json").write_text(json.dumps([record]))
    (task,) = make_tasks(["longbench_v2"], {"longbench_v2": str(tmp_path / "data.json")})
    sample = task.sample(3000, 0, 0, BYTES)
    assert "question: Why?\nChoices:\n(A) because A\n" in sample.prompt
    answers = (
        "The correct answer is (C).",
        "**The correct answer is C",
        "The correct answer is (A)",
    )
    assert [task.score(sample, answer) for answer in (*answers, "(C)")] == [1, 1, 0, 0]
    (tmp_path / "data.json").write_text(json.dumps({"data": [record]}))
    with pytest.raises(UserError, match=r"longbench_v2: .*data\.json is dict, not a list"):
        make_tasks(["longbench_v2"], {"longbench_v2": str(tmp_path / "data.json")})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "hotpotqa.jsonl cannot be read"),
        ("", "hotpotqa.jsonl is empty"),
        ('{"input": ""}\n', r'hotpotqa.jsonl, line 1 has no field "context"; it has "input"'),
        ('\n{"input', "hotpotqa.jsonl, line 2 is not valid JSON"),
        ("[]\n", "hotpotqa.jsonl, line 1 is list, not a JSON object"),
    ],
)
def test_invalid_files(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "hotpotqa.jsonl").write_text(content)
    with pytest.raises(UserError, match=f"longbench: .*{sentence}"):
        make_tasks(["longbench_hotpotqa"], {"longbench": str(tmp_path)})


def test_metrics():
    assert words_f1("The red, red car", "a red car") == pytest.approx(4 / 5)
    assert overlap_f1([], ["x"]) == 0
    assert best(words_f1, "a", []) == 0
    assert edit_similarity("abcd", "abxd") == 0.75
    # "a c" is common; the reference's second sentence has no match. 2 of 3, and 2 of 5 words.
    assert rouge_l("a b c.", "a c d. e f.") == pytest.approx(2 * (2 / 3) * 0.4 / (2 / 3 + 0.4))
    # By lines: "a c" and "e" are common, 3 of 5 and 3 of 5.
    assert rouge_l_sum("A b c.\nx e", "a, c d\ne f") == pytest.approx(3 / 5)
    # Words of the answer remain before the one that is common.
    assert rouge_l_sum("y x", "x y") == pytest.approx(1 / 2)
    # Of equally long subsequences the one earlier in the reference counts: "x" in both lines.
    assert rouge_l_sum("y x\nx", "x y") == pytest.approx(2 / 5)
    assert rouge_l_sum("", "a") == 0


def test_documents_by_position(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 50)
    write(tmp_path / "b.jsonl", {"text": "y" * 200}, {"text": "z" * 1000})
    (task,) = make_tasks(["documents"], {"documents": str(tmp_path)})
    assert [task.count(BYTES, length) for length in (50, 51, 200, 2000)] == [3, 2, 2, 0]
    document = task.sample(51, 1, 0, BYTES)
    assert document.name.endswith("b.jsonl, line 2")
    assert document.ids.dtype == np.int32 and bytes(document.ids.astype(np.uint8)) == b"z" * 51
    assert document.prompt_hash != task.sample(51, 0, 0, BYTES).prompt_hash
    with pytest.raises(UserError, match='too long for sample 2 of task "documents": only 2 doc'):
        task.sample(200, 2, 0, BYTES)
    with pytest.raises(UserError, match='has no field "body"; it has "text"'):
        make_tasks(["documents"], {"documents": str(tmp_path), "text_field": "body"})
    with pytest.raises(UserError, match='task "documents" needs --task.documents=VALUE: File'):
        make_tasks(["documents"], {})
