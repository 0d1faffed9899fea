"""What we rely on in verl: the plugin's way in, names of options, and lists of losses and modes."""

import importlib
import inspect
import subprocess
import sys
import warnings

import pytest

from integrations.verl.worker_runs import environment
from kondo.integrations.verl.gate_inputs import CENTRED_ESTIMATORS
from kondo.integrations.verl.options import LOSS_MODES, VERL, look_up, read_options
from kondo.integrations.verl.plugin import AfterImport

LIGHT = """
import sys
import verl
for name in ("verl.trainer.ppo.v1", "kondo.integrations.verl.trainer"):
    assert name not in sys.modules, name
"""
BROKEN = """
import sys, warnings
sys.modules["kondo.integrations.verl.trainer"] = None  # what an import error leaves
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from verl.trainer.ppo.v1 import get_trainer_cls
assert any("could not be loaded" in str(one.message) for one in caught)
try:
    get_trainer_cls("kondo")(config=None)
except ImportError as error:
    print(error)
"""


def run(code):
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


@pytest.fixture(scope="module")
def trainers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.trainer.ppo import v1
    return v1


@pytest.fixture(scope="module")
def verls_config(trainers):
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", ["+trainer.v1.kondo.gate=unbiased:0.1"])


@pytest.mark.verl
def test_verl_finds_the_trainer_by_entry_point(trainers):
    from kondo.integrations.verl.trainer import KondoTrainer

    assert trainers.get_trainer_cls("kondo") is KondoTrainer


@pytest.mark.verl
@pytest.mark.slow
def test_importing_verl_alone_imports_no_trainer():
    run(LIGHT)


@pytest.mark.verl
@pytest.mark.slow
def test_a_plugin_that_fails_says_so_where_a_user_looks():
    assert "kondo's trainer for verl could not be loaded" in run(BROKEN)


@pytest.mark.verl
def test_verls_own_options_fit_and_have_the_names_that_are_checked(verls_config):
    assert read_options(verls_config).gate is not None
    actor = "actor_rollout_ref.actor"
    for name in (
        f"{actor}.strategy",
        f"{actor}.loss_agg_mode",
        f"{actor}.policy_loss.loss_mode",
        f"{actor}.kl_loss_coef",
        f"{actor}.kl_loss_type",
        f"{actor}.ppo_epochs",
        f"{actor}.data_loader_seed",
    ):
        assert look_up(verls_config, name) is not None, name
    for section, keys in {
        "distillation": ("enabled",),
        actor: ("loss_scale_factor", "use_prefix_grouper", "entropy_coeff", "use_kl_loss"),
        f"{actor}": ("shuffle", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu"),
        "actor_rollout_ref.model.mtp": ("enable",),
        "trainer.v1": ("trainer_mode",),
    }.items():
        assert set(keys) <= set(look_up(verls_config, section)), section


@pytest.mark.verl
def test_refusals_hold_on_verls_own_config(verls_config):
    from omegaconf import open_dict

    config = verls_config.copy()
    with open_dict(config):
        config.distillation.enabled = True
    with pytest.raises(ValueError, match=r"distillation\.enabled must be False"):
        read_options(config)


@pytest.mark.verl
def test_losses_and_estimators_are_verls(trainers):
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    assert set(LOSS_MODES) == set(POLICY_LOSS_REGISTRY) - {"clip_cov", "kl_cov", "geo_mean"}
    known = {str(getattr(name, "value", name)) for name in ADV_ESTIMATOR_REGISTRY}
    assert set(CENTRED_ESTIMATORS) <= known


@pytest.mark.verl
def test_no_trainer_of_verls_overrides_the_update(trainers):
    for name in ("PPOTrainerSync", "PPOTrainerColocateAsync", "PPOTrainerSeparateAsync"):
        assert "_update_actor" not in vars(getattr(trainers, name))
    assert "update_actor(batch)" in inspect.getsource(trainers.PPOTrainer._update_actor)


@pytest.mark.parametrize("version", [None, "0.9.0", "0.8.3", "0.10.0", "1.0"])
def test_other_versions_are_refused(version):
    with pytest.raises(ImportError, match=r"supports verl>=0\.9\.1,<0\.10"):
        VERL.check(version)


def test_supported_versions_are_not():
    for version in ("0.9.1", "0.9.1.post1", "0.9.2"):
        VERL.check(version)


def test_changed_seams_are_refused():
    class Changed:
        def train_batch(self, rows):
            """Take another argument."""

    with pytest.raises(ImportError, match=r"builds on Changed\.train_batch"):
        VERL.check_seams(Changed, {"train_batch": ("self", "data")})


def test_a_function_is_called_once_after_an_import(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("VALUE = 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []

    def note():
        seen.append(sys.modules["imported_late"].VALUE)

    sys.meta_path.insert(0, AfterImport("imported_late", note))
    importlib.import_module("colorsys")  # another module is left alone
    assert seen == []
    importlib.import_module("imported_late")
    assert seen == [3]
    monkeypatch.delitem(sys.modules, "imported_late")
    importlib.import_module("imported_late")
    assert seen == [3]
