"""Full runs: what they write, and how they resume."""

import gc
import importlib
import json
import shlex
import shutil
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.config import Config
from mtraining_jax.reporting.audit import FIGURES
from mtraining_jax.reporting.goodput import KINDS
from mtraining_jax.reporting.progress import Display
from mtraining_jax.reporting.writers import JsonlWriter
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.checkpoint import Checkpoints, newest_step
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.utils.errors import UserError
from tests.data.tokenizer_folders import write_tokenizer
from tests.training.common import changed, dumps, losses, run, tiny_config, written


def folder_of(config, step):
    return checkpoint_folder(config) / str(step)


def test_a_whole_run_has_its_records_and_a_checkpoint(whole, config):
    assert newest_step(checkpoint_folder(whole.config)) == 4
    assert written(whole.config) == whole.records
    # Audits change nothing else.
    same = {"parallel": {"nodes": 1, "devices_per_node": 4}, "guard": {"enabled": True}}
    plain = run(changed(config, **same))
    np.testing.assert_allclose(losses(whole.records), losses(plain), rtol=1e-6)
    assert not FIGURES.keys() & plain[0].keys()
    check_records(whole.config, whole.records)
    check_print(whole.printed)


def test_resumed_run_has_bit_identical_losses(whole, capsys):
    config = whole.copy("resumed")
    cut_off_after_3(config)
    rest = run(config)
    assert [record["step"] for record in rest] == [3, 4]
    np.testing.assert_array_equal(losses(rest), losses(whole.records[2:]))
    assert [r["grad_norm"] for r in rest] == [r["grad_norm"] for r in whole.records[2:]]
    # The second audit in a row raises the alarm, also across a restart.
    assert len(whole.records[3]["alarms"]) == 1
    assert rest[1]["alarms"] == whole.records[3]["alarms"]
    assert [record["step"] for record in written(config)] == [1, 2, 3, 4]
    starts = (config.run.folder / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["resumed_from_step"] for line in starts] == [None, 2]
    # Wall time since the first start, with the time in which the run was not there.
    assert [record["restarts"] for record in (whole.records[3], rest[1])] == [0, 1]
    for record in (whole.records[3], rest[1]):
        assert sum(record[f"time_share/{kind}"] for kind in KINDS) == pytest.approx(1)
        assert min(record[f"time_share/{kind}"] for kind in ("steps", "compile", "starting")) > 0
    assert rest[1]["wall_time"] > whole.records[3]["wall_time"]
    said = capsys.readouterr().out
    assert "resuming from the checkpoint of step 2\n" in said and "differ" not in said


# test_step.py has the bits of steps, and test_state.py reads a state onto the host.
@pytest.mark.slow
@pytest.mark.parametrize("offload", [True, "all"])
def test_a_run_on_the_host_has_the_same_losses_and_resumes_without(plain_config, offload, capsys):
    whole = losses(run(plain_config))
    saves = {"interval": 1, "keep": 9}
    config = changed(plain_config, run={"name": "host"}, checkpoint=saves)
    np.testing.assert_array_equal(
        losses(run(changed(config, optimizer={"offload": offload}))), whole
    )
    for step in (3, 4):  # the state of step 2 was written while steps 3 and 4 ran
        shutil.rmtree(folder_of(config, step))
    capsys.readouterr()
    np.testing.assert_array_equal(losses(run(config)), whole[2:])
    was = json.dumps(offload)
    expected = f"the checkpoint:\n  optimizer.offload = false, was {was}\ncompiling"
    assert expected in capsys.readouterr().out


def cut_off_after_3(config):
    """Takes back what the run wrote after step 3, as if it had been killed there."""
    shutil.rmtree(folder_of(config, 4))


def test_a_complete_run_does_nothing_and_one_that_starts_anew_keeps_the_old(plain_config, capsys):
    config = changed(plain_config, checkpoint={"interval": 2})
    whole = run(config)
    capsys.readouterr()
    assert run(config) == []
    printed = capsys.readouterr().out
    assert "test is complete" in printed and "--run.steps=8" in printed
    assert "differ" not in printed
    assert run(changed(config, optimizer={"lr": 0.5}, data={"tokenizer": "bytes"})) == []
    assert "change nothing:\n  optimizer.lr = 0.5, was 0.01\nnext:" in capsys.readouterr().out
    for other, sentence in (
        ({"model": {"num_layers": 3}}, "it has model.num_layers = 2, but this run has 3"),
        ({"parallel": {"devices_per_node": 16}}, "16 devices, but JAX finds only 8 cpu devices"),
        ({"data": {"paths": ("nope.npy",)}}, '"nope.npy" does not exist'),
        ({"data": {"seed": 1}}, "resume with the same data"),
    ):
        with pytest.raises(UserError, match=sentence):
            run(changed(config, **other))
    assert run(changed(config, run={"epochs": 1e-6, "steps": 1000})) == []
    assert "step 4, and run.steps = 1\n" in capsys.readouterr().out

    # From scratch: the same losses again, and the old results are kept.
    again = run(changed(config, run={"steps": 1}, checkpoint={"resume": False}))
    np.testing.assert_array_equal(losses(again), losses(whole[:1]))
    assert "test.1" in capsys.readouterr().out
    old = config.run.folder.with_name("test.1")
    assert (old / "checkpoints" / "4").is_dir()
    check_starts(old, config)
    assert [record["step"] for record in written(config)] == [1]


def check_starts(folder, config):
    """The folder has the configuration, and one line for each start that took steps."""
    assert (folder / "config.toml").read_text() == config.to_toml()
    assert Config.load(folder / "config.toml").to_dict() == config.to_dict()
    (start,) = map(json.loads, (folder / "starts.jsonl").read_text().splitlines())
    assert start["versions"]["jax"] == jax.__version__ and "flax" in start["versions"]
    assert start["resumed_from_step"] is None and start["devices"] == {"cpu": 8}
    assert start["command"].startswith(shlex.quote(sys.argv[0]))


def check_records(config, records):
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[3]["loss"] < records[0]["loss"]
    for record in records:
        assert record["tokens"] == record["step"] * 256
        assert record["tokens_per_second"] == pytest.approx(256 / record["step_seconds"])
        assert 0.02 < record["density"] < 0.9
        assert record["density"] == pytest.approx(np.mean(record["density_per_layer"]))
        assert len(record["density_per_layer"]) == config.model.num_layers
        # 2 sequences, 2 layers, 6 heads of 16; 4 D forward and 10 D backward for each pair.
        dense = 2 * 2 * 6 * 14 * 16 * 128 * 129 / 2
        assert record["attention_flops_dense_equivalent"] == dense
        # The executed tiles hold all computed pairs, and masked ones.
        assert record["density"] < record["attention_flops_executed"] / dense < 1.1
        assert record["skipped_steps"] == 0
        # Unknown for a CPU.
        assert record["mfu"] is None and record["memory_bytes_in_use"] is None
    assert [("recall" in record) for record in records] == [True, False, False, True]
    # Attention is nearly uniform at the start: recall is close to the density, and above it.
    assert records[0]["density"] < records[0]["recall"] < 1
    assert len(records[0]["recall_per_layer"]) == config.model.num_layers
    assert records[0]["recall_worst"] == min(records[0]["recall_worst_per_layer"])
    assert 0 < records[0]["recall_worst"] < min(records[0]["recall_per_layer"])
    for name in FIGURES:
        heads = np.array(records[0][f"{name}_per_head"])
        assert heads.shape == (2, 6)
        assert records[0][name] == pytest.approx(heads.mean(), rel=1e-3, abs=1e-4)
        assert np.ptp(heads) > 0 or name.startswith("starved"), name
    assert records[0]["local_gradient_cosine"] < 1 and 0 < records[0]["output_error"]
    assert sorted(path.name for path in (config.run.folder / "masks").iterdir()) == [
        "step_0000001.png",
        "step_0000004.png",
    ]


def check_print(printed):
    for text in (
        "mtraining-jax: whole, 4 steps",
        "1 x 1 x 4 (data x node x device) of 4 cpu devices in 1 process; 4 more are not used; "
        "parallel.devices_per_node = 8 uses all",
        "attention backend: xla (no Hopper GPU)",
        "step 1/4  loss 4.",
        "done: 4 steps",
        "(recall)",
        "% in steps, ",
        "metrics.jsonl",
        "--run.steps=8",
    ):
        assert text in printed


def test_unusable_checkpoints_are_refused(plain_config, capsys):
    config = changed(plain_config, run={"steps": 1}, checkpoint={"async_save": False})
    run(config)
    longer = changed(config, run={"steps": 2})
    before = dumps(written(config))

    with pytest.raises(
        UserError,
        match=r"checkpoints/1 is a checkpoint of another model: it has "
        r"model.rope_theta = 1000000.0, but this run has 500.0",
    ):
        run(changed(longer, model={"rope_theta": 500.0}))
    with pytest.raises(UserError, match="with other trained parameters: it has optimizer.trainabl"):
        run(changed(longer, optimizer={"trainable": ("self_attn",)}))
    with pytest.raises(UserError, match="data.seed = 0, but this run has 7"):
        run(changed(longer, data={"seed": 7}))

    # A byte of the largest array changes: Orbax alone would still read it as numbers.
    arrays = folder_of(config, 1) / "arrays"
    largest = max((p for p in arrays.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x10
    largest.write_bytes(content)
    with pytest.raises(UserError, match="1 is damaged.*checkpoint.skip_damaged=true"):
        run(longer)
    largest.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="checkpoints/1 is damaged"):
        run(longer)
    next((folder_of(config, 1) / "record").glob("*meta*")).write_text("{")
    with pytest.raises(UserError, match="checkpoints/1 is damaged"):
        run(longer)
    with pytest.raises(UserError, match="checkpoints/1 is damaged"):  # none is intact
        run(changed(longer, checkpoint={"skip_damaged": True}))
    assert dumps(written(config)) == before  # no step was taken


def test_a_damaged_checkpoint_is_skipped_on_request(whole, capsys):
    config = changed(whole.copy("skipped"), checkpoint={"skip_damaged": True})
    damaged = config.run.folder / "damaged" / "4.1"
    (folder_of(config, 4) / "arrays" / "_METADATA").write_text("{}")
    rest = run(config)
    assert [record["step"] for record in rest] == [3, 4]
    np.testing.assert_array_equal(losses(rest), losses(whole.records[2:]))
    printed = capsys.readouterr().out
    assert "checkpoints/4 is not as expected" in printed and f"it is now {damaged}\n" in printed
    assert damaged.is_dir() and newest_step(checkpoint_folder(config)) == 4
    assert run(config) == []  # the new one is intact


def test_a_run_without_finite_steps_ends(plain_config):
    # A rate that moves the parameters out of the range of fp32 in one step.
    hot = changed(plain_config, optimizer={"lr": 1e38, "max_skipped_steps": 1})
    with pytest.raises(UserError) as error:
        run(changed(hot, run={"steps": 9}))
    assert "the loss is nan at step 3" in str(error.value)
    assert "2 consecutive steps were not finite" in str(error.value)
    assert "optimizer.max_skipped_steps = 1" in str(error.value)
    assert newest_step(checkpoint_folder(hot)) is None
    records = written(hot)
    assert [record["loss"] is None for record in records] == [False, True, True]
    assert [record["skipped_steps"] for record in records] == [0, 1, 2]
    # More may be skipped, but the resumed run has no other step.
    hot = changed(hot, run={"name": "resumed", "steps": 1}, optimizer={"max_skipped_steps": 9})
    run(hot)
    with pytest.raises(UserError, match="all 2 steps of resumed had a non-finite loss"):
        run(changed(hot, run={"steps": 3}))


def test_steps_with_too_large_a_gradient_are_skipped(plain_config, capsys):
    limited = {"skip_norm": 1e-3, "max_skipped_steps": 2}
    config = changed(plain_config, run={"steps": 2}, optimizer=limited)
    records = run(config)
    assert [record["skipped_steps"] for record in records] == [1, 2]
    assert (
        "2 steps with non-finite values or a gradient norm above 0.001" in capsys.readouterr().out
    )
    with pytest.raises(UserError, match="3 consecutive steps were not finite or above optimizer"):
        run(changed(config, run={"steps": 3}))


@pytest.mark.parametrize(
    ("at", "error", "sentence"),
    [
        (
            (JsonlWriter, "write"),
            OSError(28, "No space left on device"),
            r"metrics.jsonl is not writable \(No space left on dev",
        ),
        (  # The blocks of XLA grow, so a limit that passes the check may still be too small.
            (Display, "step"),
            jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of host memory while trying to allocate 48.02GiB with "
                "allocator xla_gpu_host_bfc on device 0."
            ),
            r"block of 48\.02GiB in .*_LIMIT_GB = 115 \(GiB for .* start from scratch",
        ),
    ],
)
def test_what_a_system_refuses_is_reported(plain_config, monkeypatch, at, error, sentence):
    def fail(self, record):
        raise error

    monkeypatch.setattr(*at, fail)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "115")
    with pytest.raises(UserError, match=sentence):
        run(changed(plain_config, run={"steps": 1}))


def test_interrupted_run_says_how_to_resume(plain_config, monkeypatch):
    config = changed(plain_config, checkpoint={"interval": 1})
    show = Display.step

    def interrupt_at_2(self, record):
        show(self, record)
        if record["step"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Display, "step", interrupt_at_2)
    with pytest.raises(UserError, match=r"interrupted at step 2; .* the checkpoint of step 1"):
        run(config)
    monkeypatch.undo()
    assert [record["step"] for record in run(config)] == [2, 3, 4]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_slow_write_of_a_checkpoint_does_not_end_the_run(plain_config, monkeypatch, async_save):
    """Only work with devices and other processes has the limit."""
    watch, limits = HangWatchdog.watch, {}

    def noted(self, name, *, limited=True):
        limits[name] = limited
        return watch(self, name, limited=limited)

    monkeypatch.setattr(HangWatchdog, "watch", noted)
    checkpoint = {"interval": 1, "async_save": async_save}
    run(changed(plain_config, run={"steps": 2}, checkpoint=checkpoint))
    assert {name: limited for name, limited in limits.items() if "checkpoint" in name} == {
        "writing the previous checkpoint": False,
        "saving the checkpoint of step 1": async_save,
        "saving the checkpoint of step 2": async_save,
        "writing the last checkpoint": False,
    }
    assert limits["reading the batch of step 2"]


def test_a_step_is_reported_before_the_next_is_over(plain_config, monkeypatch):
    """Steps of long sequences take minutes, and dispatching one may take as long."""
    reported, report, take = threading.Semaphore(0), Display.step, DeviceBatches.__next__
    seen, frozen = [], []

    def step(self, record):
        report(self, record)
        frozen.append(gc.get_freeze_count())
        reported.release()

    def next_batch(self):
        if self in seen:  # a step has been dispatched
            assert reported.acquire(timeout=60), "the last step is not reported"
        seen.append(self)
        return take(self)

    monkeypatch.setattr(Display, "step", step)
    monkeypatch.setattr(DeviceBatches, "__next__", next_batch)
    gc.unfreeze()  # of tests/conftest.py, as a run leaves that alone
    try:
        assert len(run(plain_config)) == len(seen) == 4
        # Full garbage collections are short in steps, and find everything after the run.
        assert min(frozen) > 10_000 and gc.get_freeze_count() == 0
    finally:
        gc.freeze()
    before = gc.get_freeze_count()  # what the caller froze stays frozen
    run(changed(plain_config, run={"name": "again", "steps": 1}))
    assert gc.get_freeze_count() > before / 2 > 0  # some of it may be freed, not unfrozen


def test_an_unwritable_folder_stops_before_any_work(config, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setattr("jax.devices", lambda *_: pytest.fail("a device was touched"))
    with pytest.raises(UserError, match=r"run.output_dir = .*file/runs.*is not writable"):
        run(changed(config, run={"output_dir": str(file / "runs")}))
    link = tmp_path / "link"
    link.symlink_to("gone")
    with pytest.raises(UserError, match="link links to gone, which does not exist; create it, or"):
        run(changed(config, run={"output_dir": str(link)}))


def test_demands_that_cannot_be_met(config, monkeypatch):
    with pytest.raises(UserError, match="checkpoint.resume = true, but .* has no checkpoint"):
        run(changed(config, checkpoint={"resume": True}))
    many = changed(config, parallel={"nodes": 4, "devices_per_node": 4})
    with pytest.raises(UserError, match="16 devices, but JAX finds only 8 cpu devices"):
        run(Config.from_dict(many.to_dict(), "a test"))
    with pytest.raises(UserError, match="pattern 'self_attm' matches no parameter"):
        run(changed(config, optimizer={"trainable": ("self_attm",)}))
    assert not checkpoint_folder(config).exists()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="metrics.wandb = true needs the package wandb"):
        run(changed(config, metrics={"wandb": True}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="audit.masks draws pictures, which needs matplotlib"):
        run(changed(config, audit={"interval": 1, "masks": ("0.0",)}))


def test_a_run_from_before_data_bos_resumes_without_it(tmp_path, capsys, monkeypatch):
    name = write_tokenizer(tmp_path / "t", "llama3")
    (tmp_path / "a.txt").write_text("hello he " * 64)
    data = {"source": "text", "paths": [str(tmp_path / "a.txt")], "tokenizer": name}
    config = tiny_config(tmp_path, run={"steps": 1}, model={"vocab_size": 264}, data=data)
    mesh = build_mesh(config)
    state = jax.tree.map(jnp.zeros_like, StateBuilder(config, mesh).abstract())
    checkpoints = Checkpoints(checkpoint_folder(config), keep=2, async_save=False)
    checkpoints.save(1, state, {}, config)
    checkpoints.close()
    module = importlib.import_module("mtraining_jax.training.run")
    read = module.read_record

    def older(folder, step):
        record = read(folder, step)
        del record["config"]["data"]["bos"]
        return record

    monkeypatch.setattr(module, "read_record", older)
    assert run(config) == []
    lines = " ".join(capsys.readouterr().out.split())
    assert "this run was trained on documents without a beginning-of-sequence token" in lines
    assert "a new run has them begin with <|begin_of_text|> (262)" in lines
    assert "complete" in lines and "was none" not in lines
    run(changed(config, data={"bos": False}))
    assert "note: this run" not in capsys.readouterr().out
