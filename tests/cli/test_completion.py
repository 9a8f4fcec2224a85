"""``drivetrain completion``: the scripts complete in the shells themselves, where these are installed."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.cli.command import COMMANDS, main, parser_of
from drivetrain.settings import DOCS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="shells in a pseudo-terminal")


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


SHELLS = [
    pytest.param("bash", ["bash", "--norc", "--noprofile", "-i"], "bind 'set enable-bracketed-paste off'",
                 marks=needs("bash")),
    pytest.param("zsh", ["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -u -D; unset zle_bracketed_paste",
                 marks=needs("zsh")),
]  # fmt: skip
TYPED = [  # what is typed, and what the command gets
    ("devi\t", "devices"),
    ("pred\t", "predict"),
    ("checkpoint inspe\ta_run\t --tens\t", "checkpoint inspect a_run.ckpt --tensors"),
    ("fit train_o\t--trainer.max_epo\t3", "fit train_of_user.py --trainer.max_epochs 3"),
    ("fit --conf\tconf\t", "fit --config config.yaml"),
    ("completion z\t", "completion zsh"),
    ("conformance clu\t", "conformance cluster"),
    ("fit --tens\t", "fit --tens"),  # an option of another command
    ("diff --w\ttwo\t", "diff --why two words"),  # a name with a space
]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Write the script of a shell into a folder with files; return its path."""
    for name in ("a_run.ckpt", "train_of_user.py", "config.yaml", "two words"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    def script(shell: str) -> str:
        assert main(["completion", shell]) == 0
        (tmp_path / "script").mkdir()
        path = tmp_path / "script" / f"drivetrain.{shell}"
        path.write_text(capsys.readouterr().out)
        return str(path)

    return script


class Terminal:
    """A shell that believes to be used by a person."""

    def __init__(self, command: list[str]) -> None:
        self.file, its = os.openpty()
        env = {**os.environ, "TERM": "dumb", "PS1": "", "HISTFILE": "/dev/null"}
        self.shell = subprocess.Popen(
            command, stdin=its, stdout=its, stderr=its, start_new_session=True, close_fds=True, env=env
        )
        os.close(its)
        self.seen = ""

    def type(self, keys: str, answer: str) -> str:
        """Type keys and Enter; return what was shown up to ``answer`` and the end of its line."""
        os.write(self.file, f"{keys}\n".encode())
        while answer not in self.seen or "\n" not in self.seen.partition(answer)[2]:
            assert select.select([self.file], [], [], 60)[0], self.seen
            self.seen += os.read(self.file, 4096).decode(errors="replace")
        before, _, after = self.seen.partition(answer)
        line, _, self.seen = after.partition("\n")
        return f"{before}{answer}{line}"

    def close(self) -> None:
        os.close(self.file)  # the terminal hangs up
        self.shell.wait(60)


@pytest.mark.parametrize(("shell", "command", "setup"), SHELLS)
def test_tab_completes_commands_options_and_files(
    shell: str, command: list[str], setup: str, script: Callable[[str], str]
) -> None:
    terminal = Terminal(command)
    try:
        terminal.type(f'{setup}; drivetrain() {{ echo "GO""T:$*."; }}; source \'{script(shell)}\'; drivetrain', "GOT:")
        for typed, got in TYPED:
            shown = terminal.type(f"drivetrain {typed}", "GOT:")
            assert shown.rpartition("GOT:")[2].strip().removesuffix(".").rstrip() == got
    finally:
        terminal.close()


@needs("fish")
def test_fish_completes_commands_options_and_files(script: Callable[[str], str]) -> None:
    path = script("fish")

    def completed(typed: str) -> list[str]:
        code = f"source '{path}'; complete -C 'drivetrain {typed}'"
        done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True)
        return [line.partition("\t")[0] for line in done.stdout.splitlines()]

    assert completed("devi") == ["devices"]
    assert set(completed("")) == set(COMMANDS)
    assert completed("checkpoint inspe") == ["inspect"]
    assert completed("checkpoint inspect --tens") == ["--tensors"]
    assert completed("checkpoint inspect a_r") == ["a_run.ckpt"]
    assert completed("fit train_of_user.py --trainer.max_epo") == ["--trainer.max_epochs"]
    assert completed("run --trainer.max_epo") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_every_option_is_in_the_script(shell: str, script: Callable[[str], str]) -> None:
    text = Path(script(shell)).read_text()
    mark = "-l " if shell == "fish" else "--"
    for name in COMMANDS:
        assert f'"{name}"' in text
        for action in parser_of(name)._actions:
            assert all(f"{mark}{each[2:]}" in text for each in action.option_strings if each.startswith("--"))
    assert all(f"{mark}trainer.{name}" in text for name in DOCS)


def test_an_unknown_shell_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert (ended.value.code, "invalid choice: 'tcsh'" in capsys.readouterr().err) == (2, True)
