"""Batches: windows, labels, layout order, shards, resume."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtraining_jax.data.loader import local_rows_and_columns
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.utils.errors import UserError
from tests.data.common import loader_of as any_loader_of
from tests.data.common import section

VOCAB = 60_000


def token_options(tmp_path, ids, **fields):
    path = tmp_path / "ids.npy"
    np.save(path, np.asarray(ids, np.uint16))
    fields = {"seq_len": 8, "batch_size": 2} | fields
    return section(VOCAB, source="tokens", paths=(str(path),), **fields)


def loader_of(data, permutation=None, **local):
    return any_loader_of(data, VOCAB, permutation, **local)


def take(loader, count):
    return [next(loader) for _ in range(count)]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


def test_sequences_and_labels_follow_the_file(tmp_path):
    batch = next(loader_of(token_options(tmp_path, np.arange(100, 120))))
    np.testing.assert_array_equal(batch["tokens"], [np.arange(100, 108), np.arange(108, 116)])
    np.testing.assert_array_equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
    np.testing.assert_array_equal(batch["labels"][:, -1], IGNORE_LABEL)
    assert all(array.dtype == np.int32 for array in batch.values())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_batches_are_in_layout_order(tmp_path_factory, data):
    seq_len = data.draw(st.integers(2, 12))
    num_tokens = data.draw(st.integers(seq_len, 60))
    permutation = np.asarray(data.draw(st.permutations(range(seq_len))))
    ids = np.asarray(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=60)))[:num_tokens]
    options = token_options(tmp_path_factory.mktemp("ids"), ids, seq_len=seq_len, batch_size=1)
    loader = loader_of(options, permutation)
    assert loader.num_sequences == num_tokens // seq_len
    left = num_tokens % seq_len
    dropped = f"; {left} tokens dropped that fill no sequence"
    assert loader.description.endswith(dropped) == (left > 0) == ("dropped" in loader.description)
    for i, batch in enumerate(take(loader, loader.num_sequences)):
        window = ids[i * seq_len : (i + 1) * seq_len]
        tokens, labels = np.full(seq_len, -1), np.full(seq_len, -1)
        tokens[permutation] = batch["tokens"][0]
        labels[permutation] = batch["labels"][0]
        np.testing.assert_array_equal(tokens, window)
        np.testing.assert_array_equal(labels, [*window[1:], IGNORE_LABEL])
    loader.close()


def test_each_epoch_has_every_sequence_once_in_a_new_order(tmp_path):
    options = token_options(tmp_path, np.arange(20 * 8), batch_size=4, shuffle=True, seed=5)
    epochs = [
        [row[0] // 8 for batch in take(loader, 5) for row in batch["tokens"]]
        for loader in [loader_of(options)]
        for _ in range(3)
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(20))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again = [row[0] // 8 for batch in take(loader_of(options), 5) for row in batch["tokens"]]
    assert again == epochs[0]
    other = loader_of(token_options(tmp_path, np.arange(160), batch_size=4, shuffle=True, seed=6))
    assert [row[0] // 8 for batch in take(other, 5) for row in batch["tokens"]] != epochs[0]


def test_batches_may_be_larger_than_an_epoch(tmp_path):
    batch = next(loader_of(token_options(tmp_path, np.arange(24), batch_size=7)))
    assert [row[0] // 8 for row in batch["tokens"]] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("consumed", [0, 3, 11])
def test_resuming_gives_the_following_batches(tmp_path, consumed):
    options = token_options(tmp_path, np.arange(9 * 8), shuffle=True)
    loader = loader_of(options)
    take(loader, consumed)
    state = json.loads(json.dumps(loader.get_state()))
    following = take(loader, 9)
    resumed = loader_of(options)
    take(resumed, 2)
    resumed.set_state(state)
    assert resumed.get_state() == state
    for left, right in zip(following, take(resumed, 9), strict=True):
        assert_same(left, right)


def test_state_is_valid_for_other_processes(tmp_path):
    options = token_options(tmp_path, np.arange(72), shuffle=True)
    loader = loader_of(options)
    take(loader, 5)
    second = loader_of(options, rows=np.array([1]))
    second.set_state(loader.get_state())
    assert_same(next(second), {k: v[1:] for k, v in next(loader).items()})


@pytest.mark.parametrize(
    "change", [{"seq_len": 4}, {"batch_size": 1}, {"seed": 1}, {"shuffle": True}]
)
def test_state_of_other_data_is_rejected(tmp_path, change):
    ids = np.arange(72)
    state = loader_of(token_options(tmp_path, ids)).get_state()
    other = loader_of(token_options(tmp_path, ids, **change))
    (field,) = change
    with pytest.raises(UserError, match=f"checkpoint's data loader had data.{field}"):
        other.set_state(state)


def test_state_of_a_grown_file_is_rejected(tmp_path):
    state = loader_of(token_options(tmp_path, np.arange(72))).get_state()
    other = loader_of(token_options(tmp_path, np.arange(73)))
    with pytest.raises(UserError, match="number of tokens = 72, but this run has 73: resume"):
        other.set_state(state)


def test_state_of_another_file_of_the_same_length_is_rejected(tmp_path):
    state = loader_of(token_options(tmp_path, np.arange(72))).get_state()
    other = loader_of(token_options(tmp_path, np.arange(72)[::-1]))
    with pytest.raises(UserError, match="had checksum of a sample of its tokens = .*: resume with"):
        other.set_state(state)
    # Checkpoints of older versions have no such checksum.
    name = "checksum of a sample of its tokens"
    other.set_state(state | {"identity": {k: v for k, v in state["identity"].items() if k != name}})


def test_unreadable_state_is_rejected(tmp_path):
    loader = loader_of(token_options(tmp_path, np.arange(72)))
    for state in ({"next_index": 3}, loader.get_state() | {"identity": None}):
        with pytest.raises(UserError, match="not readable"):
            loader.set_state(state)


def test_a_process_reads_exactly_its_rows_and_columns(tmp_path):
    rng = np.random.default_rng(0)
    permutation = rng.permutation(8)
    options = token_options(tmp_path, np.arange(50), batch_size=4, shuffle=True)
    whole = take(loader_of(options, permutation), 2)

    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @given(
        rows=st.sets(st.integers(0, 3), min_size=1), columns=st.sets(st.integers(0, 7), min_size=1)
    )
    def check(rows, columns):
        rows, columns = np.array(sorted(rows)), np.array(sorted(columns))
        local = loader_of(options, permutation, rows=rows, columns=columns)
        for batch in whole:
            assert_same(next(local), {k: v[np.ix_(rows, columns)] for k, v in batch.items()})
        local.close()

    check()


class _OneProcess:
    """A sharding as seen by a process with some of the `devices`."""

    def __init__(self, sharding, devices):
        self.sharding, self.devices = sharding, devices

    def addressable_devices_indices_map(self, shape):
        all_indices = self.sharding.devices_indices_map(shape)
        return {device: all_indices[device] for device in self.devices}


@pytest.mark.parametrize("axes", ["data first", "sequence first"])
def test_processes_read_the_shards_of_their_devices(tmp_path, axes):
    devices = np.asarray(jax.devices()[:8])
    grid = devices.reshape(2, 2, 2)
    if axes == "sequence first":  # each process has both rows and a subset of columns
        grid = grid.transpose(2, 0, 1)
    mesh = Mesh(grid, ("data", "node", "device"))
    sharding = NamedSharding(mesh, PartitionSpec("data", ("node", "device")))
    options = token_options(tmp_path, np.arange(64), shuffle=True)
    permutation = np.random.default_rng(0).permutation(8)
    whole = next(loader_of(options, permutation))
    all_indices = sharding.devices_indices_map((2, 8))
    for own in (devices[:4], devices[4:]):
        rows, columns = local_rows_and_columns(_OneProcess(sharding, own), 2, 8)
        assert (len(rows), len(columns)) == ((1, 8) if axes == "data first" else (2, 4))
        local = loader_of(options, permutation, rows=rows, columns=columns)
        batch = next(local)
        for device in own:
            for name, array in batch.items():
                part = local.shard(array, all_indices[device])
                np.testing.assert_array_equal(part, whole[name][all_indices[device]])
    if axes == "data first":
        with pytest.raises(ValueError, match="does not read all rows from 0 to 0"):
            local.shard(batch["tokens"], (slice(0, 1), slice(None)))


def test_only_local_columns_of_token_files_are_read(tmp_path):
    # A sparse file of 64 GiB, too large to read or copy entirely.
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(2**36)
    options = section(
        VOCAB,
        source="tokens",
        paths=(str(path),),
        token_dtype="uint32",
        seq_len=2**14,
        batch_size=4,
        shuffle=True,
    )
    loader = loader_of(options, rows=np.asarray([1]), columns=np.arange(0, 16))
    assert loader.num_sequences == 2**20
    assert next(loader)["tokens"].shape == (1, 16)
