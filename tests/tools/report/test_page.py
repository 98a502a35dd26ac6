"""The HTML page about runs."""

import base64
import html
import importlib.util
import io
import json
import math
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest

from mtraining_jax import report
from mtraining_jax.tools.report.page import page_of_finished_run, write_page
from mtraining_jax.utils.errors import UserError

pytest.importorskip("matplotlib")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
NAMES = '<i>a & "$x$', "_b"
VOID = {"br", "img", "meta"}


def write_run(folder, steps=40):
    """A run with everything that a record may have; step 40 has been audited and evaluated."""
    folder.mkdir()
    rng, lines = np.random.default_rng(0), []
    for step in range(1, steps + 1):
        record = {
            "step": step, "loss": None if step == 5 else 5 / step, "grad_norm": 1.0, "lr": 1e-3,
            "tokens": 100 * step, "tokens_per_second": 50.0, "step_seconds": 2.0, "mfu": 0.4,
            "memory_bytes_peak": 3 * 2**30, "memory_bytes_in_use": 2**30, "skipped_steps": 0,
            "density": 0.2, "density_per_layer": [0.1, 0.3],
        }  # fmt: skip
        if step <= 3:
            record |= {"dense_step": True, "density": 1.0, "density_per_layer": [1.0, 1.0]}
        if step % 10 == 0:
            heads = rng.random((2, 3))
            record |= {"recall": heads.mean(), "recall_worst": heads.min()}
            record |= {"recall_per_head": [[None, *row[1:]] for row in heads.tolist()]}
            record |= {"alarms": ["layer 0 head 1 <b>fails</b>"], "output_error": 0.1}
            record |= {"eval_loss": 2.0, "eval_loss_by_position": [3, 2.5, None, 1]}
            record |= {"eval_seconds": 7.5}
        lines.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join([*lines, "[1]", '{"step": 41, "lo']))
    (folder / "config.toml").write_text('name = "<script>"\n')
    (folder / "samples").mkdir()
    (folder / "samples" / "first.txt").write_text("Once & forever")
    (folder / "masks").mkdir()
    from PIL import Image

    for step in (10, 20):
        Image.new("RGB", (700, 300), "blue").save(folder / "masks" / f"step_{step:07d}.png")
    (folder / "masks" / "step_0000040.png").write_bytes(b"half of it")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [write_run(root / name) for name in NAMES]


@pytest.fixture(scope="module")
def page(folders):
    out = folders[0].parent / "page.html"
    write_page(folders, out)
    return out


class Reader(HTMLParser):
    """Checks that tags are balanced; collects links, texts by tag, and names."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.texts, self.ids = [], [], {}, []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag, attrs):
        assert tag not in ("script", "link", "iframe", "object")
        self.links += [x for name, x in attrs if name in ("src", "href", "xlink:href", "data")]
        self.ids += [x for name, x in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def test_a_page_is_one_valid_file_with_all_sections(page):
    text = page.read_text(encoding="utf-8")
    reader = Reader(text)
    assert reader.links
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in reader.links)
    assert "://" not in text and "@import" not in text
    assert not re.findall(r"url\((?!#)", text)
    assert {link[1:] for link in reader.links if link.startswith("#")} <= set(reader.ids)
    assert reader.texts["h2"] == [
        "Loss", "Density and recall", "Audits", "Speed", "Memory", "Configuration and samples",
    ]  # fmt: skip
    said = " ".join(x for texts in reader.texts.values() for x in texts)
    for name in NAMES:
        assert f"Density by layer: {name}" in said
    for sentence in (
        "layer 0 head 1 <b>fails</b>", 'name = "<script>"', "Once & forever", "3.0 GiB", "40.0%",
        "66.0 s steps (", "6.0 s dense steps (", "8.0 s audited steps (", "30.0 s evaluation (",
        "Masks of audited heads in step 10", "Alarms of _b: 4",
    ):  # fmt: skip
        assert sentence in said
    assert "20.0%" in reader.texts["dd"]  # of the sparse steps
    assert "in step 20:" not in said and "in step 40:" not in said  # first and last masks


def test_waiting_for_data_is_shown_apart_from_the_step_that_waits(tmp_path):
    (tmp_path / "run").mkdir()
    records = [
        {"step": 1, "step_seconds": 4.0, "data_seconds": 1.0, "compile_seconds": 9.0},
        {"step": 2, "step_seconds": 5.0, "data_seconds": 1.5, "recall_per_head": [[0.5]]},
        {"step": 3, "step_seconds": 3.0, "data_seconds": 0.5, "dense_step": True},
    ]
    lines = "\n".join(map(json.dumps, records))
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    write_page([tmp_path / "run"], tmp_path / "page.html")
    said = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert (  # of 21 seconds
        "run: 3.0 s steps (14%), 3.0 s waiting for data (14%), 9.0 s compilation (43%), 3.5 s"
        " audited steps (17%), 2.5 s dense steps (12%)<"
    ) in said


def test_runs_of_different_lengths_are_shown_with_their_own_steps(tmp_path):
    for name, steps in {"long": 100, "short": 60}.items():
        (tmp_path / name).mkdir()
        records = [
            # The peak is that of a process, and the run was restarted after step 50.
            {"step": i, "loss": 100 / i, "memory_bytes_peak": (3 if i <= 50 else 2) * 2**30}
            | ({"eval_loss": float(i)} if i % 20 == 0 else {})
            for i in range(1, steps + 1)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    write_page([tmp_path / "long", tmp_path / "short"], out := tmp_path / "page.html")
    text = out.read_text(encoding="utf-8")
    assert "Bold: mean over 3 to 5 steps." in text
    assert Reader(text).texts["dd"].count("3.0 GiB") == 2
    tips = re.findall("<title>(step 100&#10;.*?)</title>", text)
    assert tips[0].split("&#10;") == [
        "step 100", "long training 1", "long validation 100", "short training 1.667 (step 60)",
        "short validation 60 (step 60)",
    ]  # fmt: skip


def test_a_page_has_only_the_sections_of_its_data(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    record = {"step": 1, "loss": 2.0, "step_seconds": 1.0, "replayed_density": 0.063}
    record |= {"sparsity": "replayed density", "memory_bytes_peak": None, "grad_norm": 0.0}
    odd = record | {"lr": "fast", "density": {}, "alarms": 3, "recall_per_head": [[1], [1, "x"]]}
    lines = map(json.dumps, (record, odd | {"step": 2}))
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    assert report.main([str(folder)]) == 0
    texts = Reader((folder / "report.html").read_text(encoding="utf-8")).texts
    assert texts["h2"] == ["Loss", "Density and recall", "Speed", "Memory"]
    assert "6.3% (replayed density)" in texts["dd"]
    assert "JAX reports the memory of GPUs" in texts["p"][-1]


def test_rounding_errors_are_not_drawn_as_data(tmp_path):
    """A flat line has one height, and its axis no more digits than the figures of the page."""
    folder, lines = tmp_path / "run", []
    folder.mkdir()
    for step in range(1, 31):
        density = 1 + 3e-7 * (step % 2)
        record = {"step": step, "loss": 2.0 + step % 2, "lr": 1e-3 + 1e-9 * (step % 2)}
        record |= {"density": density, "density_per_layer": [1.0, density]}
        lines.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    write_page([folder], out := tmp_path / "page.html")
    figures = dict(re.findall("<figure><h3>(.*?) <small>(.*?)</figure>", out.read_text()))
    assert {"Loss", "Density", "Learning rate"} <= figures.keys()
    assert "Density by layer" not in figures

    def heights(name):
        (path,) = re.findall(r'<path d="([^"]*)"[^>]*stroke: #3b82f6', figures[name])
        return {float(y) for _, y in re.findall(r"[ML] ([0-9.]+) ([0-9.]+)", path)}

    assert max(heights("Loss")) - min(heights("Loss")) > 50
    for name in "Density", "Learning rate":
        assert max(heights(name)) - min(heights(name)) < 1
    ticks = re.findall("<text[^>]*>([0-9.]+%)", figures["Density"])
    assert "100.0%" in ticks and all(len(x) <= 6 for x in ticks)
    assert max(float(x[:-1]) for x in ticks) == 100


def test_columns_of_a_heat_map_stand_at_their_steps(tmp_path):
    """Audits of a run that resumed with a longer interval."""
    from PIL import Image

    (folder := tmp_path / "run").mkdir()
    recall = {1: 0.0, 2: 0.5, 3: 0.5, 4: 0.5, 7: 0.5, 10: 1.0}
    records = [{"step": step, "recall_per_head": [[x]]} for step, x in recall.items()]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    write_page([folder], out := tmp_path / "page.html")
    (code,) = re.findall(r'<image [^>]*base64,\s*([^"]+)"', out.read_text(encoding="utf-8"))
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(code))).convert("RGB"))
    row = pixels[len(pixels) // 2]
    widths = [np.all(row == color, axis=1).mean() for color in (row[0], row[-1])]
    # Of ten columns, step 1 has its own; that of step 9 is nearest to 10, too.
    assert widths == pytest.approx([0.1, 0.2], abs=0.01)


def test_values_are_shown_under_the_mouse(folders, page, tmp_path):
    """Bands cover a chart from left to right, each with the values of its step."""
    write_page(folders[1:], out := tmp_path / "page.html")
    figures = dict(re.findall("<figure><h3>(.*?) <small>(.*?)</figure>", out.read_text()))
    bands = re.findall(
        '<rect x="([^"]+)" width="([^"]+)"[^>]*><title>(.*?)</title>', figures["Loss"]
    )
    assert len(bands) > 30
    for (x, width, _), (following, *_) in zip(bands, bands[1:], strict=False):
        assert float(x) + float(width) == pytest.approx(float(following), abs=0.11)
    texts = [text for *_, text in bands]
    assert "step 10&#10;training 0.5&#10;validation 2" in texts
    assert "<title>step 10&#10;mean " in figures["Recall"]
    assert "<title>position 2&#10;2.5</title>" in figures["Validation loss by position"]
    assert "<title>step 40&#10;20.00%</title>" in figures["Density"]
    both = html.unescape(page.read_text(encoding="utf-8"))
    assert f"{NAMES[0]} validation 2\n_b training 0.5\n_b validation 2</title>" in both


def test_a_comparison_lists_where_configurations_differ(tmp_path):
    folders, out = [], tmp_path / "page.html"
    for name, text in (
        ("a", "[run]\nname = 'a'\nsteps = 2\n[sparsity]\nkind = 'dense'"),
        ("b", "[run]\nname = 'b'\nsteps = 2\n[sparsity]\nkind = 'moba'\ntop_k = 3"),
        ("c", "[run]\n" + "x." * 4000 + "y = 1"),
    ):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "config.toml").write_text(text)
        (folders[-1] / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
    write_page(folders[:2], out)
    cells = Reader(out.read_text(encoding="utf-8")).texts["td"]
    assert cells == ["a", "b", "sparsity.kind", "dense", "moba", "sparsity.top_k", "3"]
    write_page(folders[:1], out)
    assert "td" not in Reader(out.read_text(encoding="utf-8")).texts
    write_page(folders, out)  # without what is nested too deep
    assert "run.steps" in Reader(out.read_text(encoding="utf-8")).texts["td"]


def test_a_page_says_what_ran_when_and_where(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    model = dict(
        vocab_size=257, hidden_size=128, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64,
        intermediate_size=384, max_position_embeddings=2048, tie_word_embeddings="true",
    )  # fmt: skip
    fields = "".join(f"{name} = {value}\n" for name, value in model.items())
    config = (
        f'[model]\nfamily = "FAMILY"\n{fields}[sparsity]\nkind = "moba"\n[data]\nseq_len = 2048'
    )
    (folder / "config.toml").write_text(config.replace("FAMILY", "qwen2"))
    start = {
        "time": "2026-11-28T15:05:33+00:00", "command": "train.py --run.name='<x>'",
        "versions": {"mtraining-jax": "0.1.0", "jax": "0.11.2", "python": "3.12"},
        "devices": {"NVIDIA H100": 8}, "processes": 2,
    }  # fmt: skip
    again = start | {"time": "2026-11-29T15:05:33+00:00"}
    path = folder / "starts.jsonl"
    path.write_text("".join(f"{json.dumps(x)}\n" for x in (start, again)) + "[1]\n{half")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "wall_time": 3725.2}')

    def read():
        write_page([folder], out := tmp_path / "page.html")
        texts = Reader(out.read_text(encoding="utf-8")).texts
        assert texts["h1"] == ["run"] and "run" not in texts["h3"]  # the title stands there once
        return dict(zip(texts["dt"], texts["dd"], strict=True)), texts["pre"]

    facts, (command, *_) = read()
    assert command == "train.py --run.name='<x>'"
    assert {
        "started": "2026-11-28 15:05 UTC", "restarts": "1",
        "devices": "8 x NVIDIA H100, 2 processes",
        "versions": "mtraining-jax 0.1.0, jax 0.11.2", "model": "qwen2, 427.3 K parameters",
        "attention": "moba", "sequence": "2,048 tokens", "duration": "1:02:05",
    }.items() <= facts.items()  # fmt: skip
    # A page runs no code of the folder, and needs none of these facts.
    (tmp_path / "run" / "own_family_of_a_page.py").write_text("raise AssertionError")
    (folder / "config.toml").write_text(config.replace("FAMILY", "own_family_of_a_page:X"))
    path.write_text(json.dumps({"time": 3, "devices": [], "versions": 1, "command": None}))
    facts, _ = read()
    assert facts["model"] == "own_family_of_a_page:X" and "started" not in facts
    path.write_bytes(b"\xff")
    (folder / "config.toml").write_text("[model]\nfamily = 'qwen2'\nhidden_size = 'x'")
    assert read()[0]["model"] == "qwen2"


def test_values_of_damaged_files_are_skipped(tmp_path):
    """Each value in a run of its own, all in one page."""
    folders, out = [], tmp_path / "page.html"
    values = 10**400, -(10**400), 10**18, 1e308, -1e308, math.inf, [10**400], [[[1]]]
    for number, value in enumerate(values):
        folder = write_run(tmp_path / f"run{number}", steps=12)
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()[:12]]
        lines[3] |= dict.fromkeys(lines[3].keys() - {"step"}, value)
        lines[9] |= {"recall_per_head": [[value] * 3] * 2, "eval_loss_by_position": [value, 1]}
        lines[10] |= {"time_share/steps": value, "density_per_layer": [value, 0.5]}
        lines.insert(5, lines[4] | {"step": value})
        path.write_text("\n".join(map(json.dumps, lines)))
        folders.append(folder)
    write_page(folders, out)
    texts = Reader(out.read_text(encoding="utf-8")).texts
    assert "Loss" in texts["h2"]
    assert texts["dd"].count("1,200") == len(values)  # tokens of the last step


def test_a_picture_that_inflates_is_skipped(tmp_path):
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    folder, out = write_run(tmp_path / "run", steps=1), tmp_path / "page.html"
    masks = folder / "masks"
    large = io.BytesIO()
    Image.new("1", (2**13, 2**13)).save(large, "PNG")
    assert large.tell() < 2**16
    header = struct.pack(">II", 2**16, 2**16) + bytes([1, 0, 0, 0, 0])
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x))
        for name, x in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b""))
    )
    text = PngInfo()
    text.add_text("note", "x" * 2**24, zip=True)
    noted = io.BytesIO()
    Image.new("1", (8, 8)).save(noted, "PNG", pnginfo=text)
    for damaged in (large.getvalue(), bomb, noted.getvalue(), bomb[:20], b"P5 9 9 255 "):
        (masks / "step_0000040.png").write_bytes(damaged)
        write_page([folder], out)
        said = out.read_text(encoding="utf-8")
        assert "Masks of audited heads in step 10" in said and "heads in step 40" not in said


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda run: None, "metrics.jsonl does not exist; name a run folder that has it"),
        (lambda run: run.mkdir(), "metrics.jsonl does not exist; name a run folder"),
        (lambda run: (run / "metrics.jsonl").mkdir(parents=True), "metrics.jsonl is a folder"),
        (
            lambda run: (run.mkdir(), (run / "metrics.jsonl").write_text('{"st')),
            "metrics.jsonl has no steps; the first finished step writes",
        ),
    ],
)
def test_a_folder_without_metrics_is_named_in_one_sentence(tmp_path, capsys, make, sentence):
    make(tmp_path / "run")
    assert report.main([str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert sentence in page_of_finished_run(tmp_path / "run")


def test_what_a_page_cannot_be_written_without(folders, tmp_path, monkeypatch, capsys):
    assert report.main([]) == 2
    assert "name a run folder, e.g. runs/tiny" in capsys.readouterr().err
    assert report.main([str(folders[0]), f"{folders[0]}/."]) == 2
    assert f"{folders[0]} is given more than once" in capsys.readouterr().err
    with pytest.raises(UserError, match="missing/a.html cannot be written"):
        write_page(folders[:1], tmp_path / "missing" / "a.html")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = page_of_finished_run(folders[0])
    assert said.startswith("no report.html: it needs matplotlib: uv run --extra plot")
    assert not (folders[0] / "report.html").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_phone_shows_the_page_without_scrolling_sideways(page, tmp_path):
    width = "document.documentElement.scrollWidth"
    script = f"<script>onload = () => parent.document.title = [innerWidth, {width}]</script>"
    text = re.sub(r"<meta http-equiv[^>]*>", script, page.read_text(encoding="utf-8"))
    # A frame, since the window has at least 500 pixels.
    frame = f'<title></title><iframe width="360" srcdoc="{html.escape(text)}"></iframe>'
    (tmp_path / "page.html").write_text(f'<meta charset="utf-8">{frame}', encoding="utf-8")
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]  # fmt: skip
    url = f"file://{tmp_path / 'page.html'}"
    shown = subprocess.run(
        [*command, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True
    )
    assert re.search("<title>(.*)</title>", shown.stdout)[1] == "360,360"
