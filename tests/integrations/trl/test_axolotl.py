"""axolotl's example, with a stand-in for axolotl itself, which is too large to install here."""

import importlib
import sys
import types
from pathlib import Path

import pytest
import yaml

from integrations.trl.test_configs import ForeignConfig, ForeignTrainer
from integrations.trl.tiny import OPTIONS, policy, prompts, tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def config(monkeypatch):
    """The example's file; names in it can be imported, as `cd examples` makes them."""
    name = "axolotl.core.trainers.grpo.trainer"
    module = types.ModuleType(name)
    module.AxolotlGRPOTrainer = ForeignTrainer
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield yaml.safe_load((EXAMPLES / "axolotl_grpo.yaml").read_text())
    sys.modules.pop("axolotl_kondo", None)


def named(path):
    """What axolotl finds under a name of its file."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_the_example_s_class_trains_a_tenth(tmp_path, config):
    kind, functions = named(config["trainer_cls"]), map(named, config["trl"]["reward_funcs"])
    options = OPTIONS | {"per_device_train_batch_size": 8, "num_generations": 8}
    trained = kind(
        policy(),
        list(functions),
        args=ForeignConfig(str(tmp_path), **options),
        train_dataset=prompts(),
        callbacks=[],
        processing_class=tokenizer(),
    )
    trained.train()
    logs = [log for log in trained.state.log_history if "kondo/rows_trained" in log]
    assert [log["kondo/rows_trained"] for log in logs] == [2, 2, 2]
    assert [log["kondo/rows_seen"] for log in logs] == [16, 16, 16]


def test_the_example_s_data_become_prompts(config):
    (dataset,) = config["datasets"]
    to_prompt, options = named(dataset["type"])(config)
    row = {"question": "Why?"}
    assert to_prompt(row)["prompt"] == [{"role": "user", "content": "Why?"}]
    assert options["remove_columns"] == ["question"]
