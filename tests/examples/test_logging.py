"""The page about logging: its recipes write what can be read back, its tables have every key."""

import csv
import json
import math
import re
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import kondo

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "logging.md"
CLEANUP = "temporary.cleanup()\n"
BLOCK = 32_768


def documented():
    """Return the keys of each table of the page, without the prefix."""
    tables = re.split(r"^\| key \|.*\n", PAGE.read_text(), flags=re.M)[1:]
    lines = [re.findall(r"^\| (`.*?) \|", table, flags=re.M) for table in tables]
    return [set(re.findall(r"`(\w+)`", " ".join(table))) for table in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the page's code writes, before it is removed."""
    for package in ("tensorboard", "wandb"):
        pytest.importorskip(package)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    code = "".join(blocks)
    assert CLEANUP in code
    names = {"__name__": "__main__"}
    exec(compile(code.replace(CLEANUP, ""), str(PAGE), "exec"), names)
    yield names["folder"]
    names["temporary"].cleanup()


def gated_keys():
    """The keys of a gated step by another signal than delight, one of each kind."""
    common, gated, _ = documented()
    renamed = {key.replace("delight_", "signal_") for key in gated}
    # The values of UnbiasedGate are positive: there is no share of negative ones.
    return {f"kondo/{key}" for key in common | renamed} - {"kondo/bias_negative"}


def test_tensorboard_has_every_key(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == gated_keys()
    rates = events.Scalars("kondo/rate")
    assert [event.step for event in rates] == list(range(5))
    assert [round(event.value, 6) for event in rates] == [0.1] * 5


def wandb_records(file):
    """Yield the messages of W&B's file: a log of LevelDB's format behind 7 bytes of their own."""
    data, place, message = file.read_bytes(), 7, b""
    while place + 7 < len(data):
        if BLOCK - place % BLOCK < 7:  # too short for a header: padding
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last of several parts
            yield message
            message = b""


def test_wandb_has_every_key(folder):
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for message in wandb_records(file):
        record = wandb_internal_pb2.Record.FromString(message)
        if record.HasField("history"):
            items = record.history.item
            rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
    assert [row["_step"] for row in rows] == list(range(5))
    assert all(gated_keys() <= set(row) for row in rows)
    assert [row["kondo/rows_trained"] for row in rows] == [20] * 5


def test_files_have_what_the_page_says(folder):
    lines = [
        json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
        for line in (folder / "log.jsonl").read_text().splitlines()
    ]
    assert [set(line) for line in lines] == [gated_keys() | {"step"}] * 5
    with open(folder / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == list("01234")
    assert all(math.isfinite(float(value)) for row in rows for value in row.values())


def small_step(gate, advantages, group=None, **options):
    policy = torch.nn.Linear(3, 2)

    def log_prob(rows):
        return policy(rows).log_softmax(-1)[:, 0]

    batch = torch.randn(len(advantages), 3)
    given = kondo.Options(module=policy, **options)
    return kondo.backward(log_prob, batch, advantages, gate=gate, group=group, options=given)


def keys(report):
    return set(report.as_dict(prefix=""))


def test_the_tables_have_the_keys_of_a_step():
    common, gated, ranked = documented()
    centred = torch.linspace(-1, 1, 20)
    assert keys(small_step(None, centred)) == common - {"price"}
    # Both signs are kept or drawn, so that every number exists.
    assert keys(small_step(kondo.Gate(rate=0.5), centred)) == common | gated
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        options = {"group": "world", "all_reduce": True}
        report = small_step(kondo.Gate(rate=0.5), centred, **options)
        assert keys(report) == common | gated | ranked
        empty = small_step(kondo.Gate(price=1e9), centred, **options)
        for flat in (report.as_dict(), empty.as_dict()):
            assert {type(value) for value in flat.values()} == {int, float}
            json.dumps(flat, allow_nan=False)
    finally:
        dist.destroy_process_group()
