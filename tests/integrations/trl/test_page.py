"""docs/integrations/trl.md explains every key that the trainers log."""

import re
from pathlib import Path

import pytest

from integrations.trl.tiny import trainer

PAGE = Path(__file__).parents[3] / "docs" / "integrations" / "trl.md"
SECONDS = {f"kondo/seconds_{stage}" for stage in ("screen", "select", "forward", "backward")}


def explained(title="Metrics"):
    """The keys that the tables of a section name."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")]
    return {key for row in rows for key in re.findall(r"`(kondo/\w+)`", row)}


@pytest.mark.parametrize("gate", ["unbiased:0.3", "delight:0.3", "variance:0.3"])
def test_every_logged_key_is_explained(tmp_path, gate):
    gated = trainer(tmp_path, max_steps=1, kondo_gate=gate)
    gated.train()
    logged = {key for log in gated.state.log_history for key in log if key.startswith("kondo/")}
    assert logged >= {"kondo/rate", "kondo/noise", "kondo/rows_trained"} | SECONDS
    assert {key.replace("kondo/delight_", "kondo/signal_") for key in logged} <= explained()


def test_every_explained_key_is_logged(tmp_path):
    gated = trainer(tmp_path, max_steps=1, kondo_gate="delight:0.3")
    gated.train()
    logged = {key for log in gated.state.log_history for key in log if key.startswith("kondo/")}
    named = {key.replace("kondo/delight_", "kondo/signal_") for key in logged}
    # Tokens that a sampler could not score are counted where the sampler's log-probs are used.
    assert explained() - named == {"kondo/unscored_tokens"}
