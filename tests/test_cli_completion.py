"""Completion with Tab, asked of the shells themselves."""

import contextlib
import shutil
import subprocess
import sys

import pytest

from kondo import cli


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Shell -> file with its script; of bash from a process of its own, as users make them."""
    folder = tmp_path_factory.mktemp("completion")
    command = [sys.executable, "-m", "kondo", "completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    made = {"bash": folder / "bash"}
    made["bash"].write_text(done.stdout)
    for shell in ("zsh", "fish"):  # a process takes seconds to import every study
        made[shell] = folder / shell
        with made[shell].open("w") as file, contextlib.redirect_stdout(file):
            assert cli.main(["completion", shell]) == 0
    return made


def completed(script, *words):
    """Return what bash offers for the last of the words."""
    line = " ".join(f"'{word}'" for word in ("kondo", *words))
    code = f"""
source {script}
COMP_WORDS=({line}); COMP_CWORD={len(words)}; COMP_LINE="kondo {" ".join(words)}"
COMP_POINT=${{#COMP_LINE}}
spec=$(complete -p kondo); function=${{spec#*-F }}; function=${{function%% *}}
$function kondo "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pl"], {"plot", "plan"}),
        (["run", "mnist-k"], {"mnist-kondo"}),
        (["plot", "lm-"], {"lm-rl", "lm-gates", "lm-frictions"}),
        (["run", "demo", "--sm"], {"--small"}),
        (["run", "demo", "--device", ""], {"auto", "cpu", "cuda"}),
        (["actors", "run", "rev"], {"reversal"}),
        (["completion", "f"], {"fish"}),
    ],
)
def test_bash_completes_commands_options_and_names(scripts, words, offered):
    assert set(completed(scripts["bash"], *words)) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_knows_commands_and_studies(scripts, shell):
    text = scripts[shell].read_text()
    # fish writes long options without their dashes
    assert all(word in text for word in ("mnist-kondo", "small", "completion", "reversal"))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_script(scripts, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    subprocess.run([shell, "-n", str(scripts[shell])], check=True)


def test_other_shells_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["completion", "tcsh"])
    assert stop.value.code == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


def test_a_missing_shtab_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    assert "kondo completion: shtab is not installed. Run: pip install" in capsys.readouterr().err
