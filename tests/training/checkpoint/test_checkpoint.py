"""Reading checkpoints: messages for failed reads, and cleanup after them."""

import asyncio
import functools
import gc
import json
import logging
import os
import re
import resource
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint._src import asyncio_utils

from mtraining_jax.config import Config
from mtraining_jax.models.huggingface.checksums import checksum
from mtraining_jax.training.checkpoint import Checkpoints, check_intact, newest_step, read_state
from mtraining_jax.training.checkpoint.errors import (
    DamagedCheckpoint,
    WaitingEventLoop,
    print_errors_once,
    unreadable,
)
from mtraining_jax.training.checkpoint.same_model import check_same_model, check_shapes
from mtraining_jax.training.state import TrainState
from mtraining_jax.utils.errors import UserError
from tests.training.common import changed


def state_of(count, make=jnp.ones):
    """A state of `count` parameters, without a model."""
    scalar = make((), jnp.int32)
    return TrainState(
        step=scalar,
        parameters={f"p{i}": make((64, 64), jnp.float32) for i in range(count)},
        opt_state=(),
        skipped=scalar,
        skipped_in_row=scalar,
        rng=make((2,), jnp.uint32),
    )


def on_one():
    return SingleDeviceSharding(jax.devices()[0])


def random(shape, dtype):
    """Bytes that do not compress."""
    bits = np.random.default_rng(0).integers(2**30, size=shape)
    return jnp.asarray(bits.astype(dtype))


def test_damage_is_one_message_with_the_first_cause(config, tmp_path, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda x: reported.append(repr(x.exc_value)))
    checkpoints = Checkpoints(tmp_path, keep=1, async_save=False)
    checkpoints.save(1, state_of(20), None, config)
    checkpoints.close()
    for path in (tmp_path / "1" / "arrays").rglob("*"):
        if path.is_file() and path.parent.name == "d":  # the data, not the metadata
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    abstract = functools.partial(jax.ShapeDtypeStruct, sharding=on_one())
    make_loop, hook = asyncio.new_event_loop, sys.unraisablehook
    with pytest.raises(UserError) as error:
        read_state(tmp_path, 1, state_of(20, abstract), config)
    start = re.escape(f"the checkpoint {tmp_path / '1'} is damaged (OUT_OF_RANGE: array ")
    assert re.fullmatch(rf"{start}[\w.]+ in {tmp_path}/[\w./]+\); train.py .*", str(error.value))
    assert asyncio.new_event_loop is make_loop and sys.unraisablehook is hook
    del error
    gc.collect()
    assert reported == []


def test_changed_metadata_is_damage(config, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, async_save=False)
    checkpoints.save(1, state_of(2), None, config)
    checkpoints.close()
    check_intact(tmp_path, 1)
    record = tmp_path / "1" / "record" / "metadata"
    content = json.loads(record.read_text())
    without = {k: v for k, v in content["checksums"].items() if k != "parameters.p1"}
    sizes = tmp_path / "1" / "arrays" / "array_metadatas" / "process_0"
    abstract = functools.partial(jax.ShapeDtypeStruct, sharding=on_one())
    for file, value, sentence in (
        (record, content | {"checksums": without}, "the checksum of parameters.p1 does not match"),
        (record, content | {"config": {}}, "its record is incomplete"),
        (record, content | {"shapes": None}, "its record is incomplete"),
        (record, [], "its record is incomplete"),
        (sizes, None, "Expecting value"),
    ):
        before = file.read_text()
        file.write_text("" if value is None else json.dumps(value))
        for read in (
            lambda: check_intact(tmp_path, 1),
            lambda: read_state(tmp_path, 1, state_of(2, abstract), config),
        ):
            with pytest.raises(UserError, match=f"1 is damaged .{sentence}"):
                read()
        file.write_text(before)
    record.write_text(json.dumps(content | {"version of checksums": 3}))
    with pytest.raises(UserError, match="1 has checksums of version 3, but") as error:
        check_intact(tmp_path, 1)
    assert not isinstance(error.value, DamagedCheckpoint)
    record.write_text(json.dumps(content))
    for name in ("arrays/_METADATA", "record/metadata"):
        (tmp_path / "1" / name).unlink()
        with pytest.raises(UserError, match=rf"missing from .*1 \({name}\): it is damaged"):
            check_intact(tmp_path, 1)


def test_a_checkpoint_with_checksums_of_version_1_is_verified_by_these(config, tmp_path):
    state = state_of(2)
    checkpoints = Checkpoints(tmp_path, keep=1, async_save=False)
    checkpoints.save(1, state, None, config)
    checkpoints.close()
    record = tmp_path / "1" / "record" / "metadata"
    content = json.loads(record.read_text())
    del content["version of checksums"]
    record.write_text(json.dumps(content))
    abstract = state_of(2, functools.partial(jax.ShapeDtypeStruct, sharding=on_one()))
    with pytest.raises(DamagedCheckpoint, match="the checksum of .* does not match"):
        check_intact(tmp_path, 1)
    arrays = vars(state) | {f"parameters.{name}": x for name, x in state.parameters.items()}
    content["checksums"] = {name: int(checksum(arrays[name], 1)) for name in content["checksums"]}
    record.write_text(json.dumps(content))
    check_intact(tmp_path, 1)
    read_state(tmp_path, 1, abstract, config)


def test_reads_that_continue_after_a_failure_have_an_open_loop():
    failed, woken, threads = threading.Event(), [], []

    async def fail():
        raise ValueError("damaged")

    async def read():
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake():
            failed.wait(60)
            try:
                loop.call_soon_threadsafe(done.set)
                woken.append("open")
            except RuntimeError as error:
                woken.append(str(error))

        threads.append(threading.Thread(target=wake))
        threads[0].start()
        await done.wait()
        raise ValueError("damaged as well")

    async def all_reads():
        await asyncio.gather(read(), fail())

    with pytest.raises(ValueError, match="^damaged$"):
        loop = WaitingEventLoop()
        try:
            loop.run_until_complete(all_reads())
        finally:
            threading.Timer(0.05, failed.set).start()
            loop.close()
    threads[0].join()  # the loop may end before the thread has recorded its result
    assert woken == ["open"]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(13, "Permission denied"), "could not be read ([Errno 13] Permission"),
        (OSError(5, "Input/output error"), "could not be read ([Errno 5] Input/output error"),
        (ValueError("UNAVAILABLE: no answer\nof the server"), "could not be read (UNAVAILABLE: no"),
        (TimeoutError("too slow"), "could not be read (too slow"),
        (RuntimeError("INTERNAL: of the library"), "could not be read (INTERNAL: of the library"),
        (MemoryError(), "not enough memory to read the checkpoint runs/7 (MemoryError)"),
        (RuntimeError("RESOURCE_EXHAUSTED: out"), "not enough memory to read the checkpoint"),
        (OSError(12, "Cannot allocate memory"), "not enough memory to read the checkpoint"),
        (FileNotFoundError(2, "No such file"), "missing from the checkpoint runs/7 ([Errno 2] No"),
        (KeyError('Item "record" was not found in the checkpoint.'), "checkpoint runs/7 ('Item"),
        (ValueError("DATA_LOSS: checksum"), "the checkpoint runs/7 is damaged (DATA_LOSS"),
        (
            ValueError("FAILED_PRECONDITION: ZSTD_decompressStream() failed: Data corruption"),
            "the checkpoint runs/7 is damaged (FAILED_PRECONDITION",
        ),
        (TypeError("-1 is not valid"), "checkpoint runs/7 is not as expected (TypeError: -1 is n"),
        (json.JSONDecodeError("Expecting value", "{", 1), "runs/7 is damaged (Expecting value"),
    ],
)
def test_only_evidence_of_damage_is_called_damage(error, sentence):
    outer = ValueError("while reading <bound method f>")
    outer.__cause__ = error
    for raised in (error, outer):
        message = str(unreadable(Path("runs/7"), raised))
        assert sentence in message and "\n" not in message
        assert "delete" not in message
        assert ("checkpoint.skip_damaged=true" in message) == ("damaged" in message)


def test_a_checkpoint_that_cannot_be_written_is_one_message(
    config, tmp_path, monkeypatch, caplog, capfd
):
    checkpoints = Checkpoints(tmp_path, keep=2, async_save=True)
    checkpoints.save(1, state_of(20), None, config)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=2, async_save=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        checkpoints.save(2, state_of(20, random), None, config)
        with pytest.raises(UserError) as error:
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "a checkpoint could not be written (File too large); older ones" in str(error.value)
    assert "\n" not in str(error.value)
    del error
    gc.collect()
    assert capfd.readouterr().err == "" and caplog.text == ""
    assert newest_step(tmp_path) == 1


@pytest.mark.parametrize("keep", [1, 3])
def test_a_checkpoint_counts_when_it_is_on_disk(config, tmp_path, monkeypatch, keep):
    """Of a run that ends abnormally, the newest complete one is named."""
    checkpoints = Checkpoints(tmp_path, keep=keep, async_save=True)
    assert checkpoints.newest_complete() is None
    checkpoints.save(1, state_of(1), None, config)
    checkpoints.wait()
    assert checkpoints.newest_complete() == newest_step(tmp_path) == 1
    goes_on, rename = threading.Event(), os.rename

    def slow(*paths):
        assert goes_on.wait(60)
        rename(*paths)

    monkeypatch.setattr(os, "rename", slow)
    checkpoints.save(2, state_of(1), None, config)
    assert checkpoints.newest_complete() == newest_step(tmp_path) == 1
    goes_on.set()
    checkpoints.close()
    assert checkpoints.newest_complete() == newest_step(tmp_path) == 2


def test_a_folder_that_moves_during_a_run_is_named(config, tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2, async_save=False)
    folder.rename(tmp_path / "moved")
    folder.write_text("in the way, as Orbax would make a new folder")
    with pytest.raises(UserError, match=r"checkpoints was moved or deleted during the run, so a"):
        checkpoints.save(1, state_of(1), None, config)
    checkpoints.close()


def test_other_users_of_the_same_libraries_are_not_affected(caplog):
    make_loop, hook = asyncio.new_event_loop, sys.unraisablehook
    print_errors_once()
    assert asyncio.new_event_loop is make_loop and sys.unraisablehook is hook
    assert asyncio_utils.asyncio.new_event_loop is WaitingEventLoop
    absl = logging.getLogger("absl")
    for path, shown in (("orbax/checkpoint/futures.py", False), ("grain/loader.py", True)):
        entry = dict(name="absl", levelno=logging.ERROR, pathname=path)
        absl.handle(logging.makeLogRecord({**entry, "msg": f"{path} raised an exception"}))
        assert (f"{path} raised an exception" in caplog.text) == shown


def test_a_checkpoint_that_is_older_than_a_field_had_its_default(config):
    saved = config.to_dict()
    del saved["model"]["rms_norm_eps"], saved["model"]["rope_scaling"], saved["optimizer"]
    check_same_model(Path("runs/7"), saved, config)
    other = changed(config, model={"rms_norm_eps": 1e-5})
    with pytest.raises(UserError, match=r"has model\.rms_norm_eps = 1e-06, but this run has 1e-05"):
        check_same_model(Path("runs/7"), saved, other)

    scaled = config.to_dict()
    scaled["model"]["rope_scaling"] = {"factor": 4.0}
    stretched = Config.from_dict(scaled, "a test")
    check_same_model(Path("runs/7"), scaled, stretched)


def test_other_shapes_are_refused():
    parameters = state_of(1).parameters
    check_shapes(Path("runs/7"), {"p0": [64, 64]}, parameters)
    with pytest.raises(UserError, match=r"its parameter p1 has shape \[8\], but None is needed"):
        check_shapes(Path("runs/7"), {"p0": [64, 64], "p1": [8]}, parameters)


def test_a_checkpoint_with_fewer_parameters_is_of_another_model(config, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, async_save=False)
    checkpoints.save(1, state_of(1), None, config)
    checkpoints.close()
    abstract = functools.partial(jax.ShapeDtypeStruct, sharding=on_one())
    with pytest.raises(UserError, match=r"another model: its parameter p1 has shape None, but \["):
        read_state(tmp_path, 1, state_of(2, abstract), config)
