"""The command ``drivetrain completion``: print completion scripts for bash, zsh and fish. The scripts are generated
from the parsers of the commands.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from drivetrain.base.lazy import on_first_use

with on_first_use:
    from drivetrain.cli import command

_SHELLS = {
    "bash": "source <(drivetrain completion bash), in ~/.bashrc",
    "zsh": "source <(drivetrain completion zsh), in ~/.zshrc after compinit",
    "fish": "drivetrain completion fish > ~/.config/fish/completions/drivetrain.fish",
}


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(
        prog, description="Print a script that completes commands, options and file names in your shell.",
        epilog="\n".join(f"{shell}: {how}" for shell, how in _SHELLS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    made.add_argument("shell", choices=tuple(_SHELLS), help="the shell")
    return made


def main(arguments: Sequence[str], prog: str = "drivetrain completion") -> int:
    """Print the script."""
    shell = parser(prog).parse_args(arguments).shell
    tree = dict(_words("", command.parser(), command.COMMANDS))
    cases = "\n".join({"bash": _of_bash, "zsh": _of_zsh, "fish": _of_fish}[shell](tree))
    script = Path(__file__).with_name("templates").joinpath(f"{shell}.txt").read_text(encoding="utf-8")
    commands = _is_command(tree, " " if shell == "fish" else "|")
    print(script.replace("@commands", commands).replace("@cases", cases), end="")
    return 0


def _words(
    path: str, parser: argparse.ArgumentParser, commands: Mapping[str, command.Command] | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a command and its subcommands, such as "checkpoint diff", each with the words that can follow."""
    words: dict[str, str] = {}
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        options = [each for each in action.option_strings if each.startswith("--")]
        words.update(dict.fromkeys(options, _help(parser, action)))
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            words.update({each.dest: _help(parser, each) for each in action._choices_actions})
        elif not options and action.choices:
            words.update(dict.fromkeys(map(str, action.choices), ""))
    for name, each in (commands or {}).items():
        below[name], words[name] = command.parser_of(name), each.help
    yield path, words
    for name, its in below.items():
        yield from _words(f"{path} {name}".strip(), its)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    if action.help in (None, argparse.SUPPRESS):
        return ""
    return " ".join(parser._get_formatter()._expand_help(action).split())


def _is_command(tree: Mapping[str, object], separator: str) -> str:
    """Return a shell pattern for all commands, such as "checkpoint diff"."""
    return separator.join(f'"{path}"' if " " in path else f'" {path}"' for path in tree if path)


def _of_bash(tree: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for path, words in tree.items():
        yield f'        "{path}") words={shlex.quote(" ".join(words))} ;;'


def _of_zsh(tree: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for path, words in tree.items():
        listed = [shlex.quote(f"{word}:{text}" if text else word) for word, text in words.items()]
        options, commands = (
            [each for each, word in zip(listed, words, strict=True) if word.startswith("-") == is_option]
            for is_option in (True, False)
        )
        yield f'        "{path}") options=({" ".join(options)})\n            commands=({" ".join(commands)}) ;;'


def _of_fish(tree: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for path, word, text in ((path, word, text) for path, words in tree.items() for word, text in words.items()):
        what = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
        quoted = text.replace("\\", "\\\\").replace("'", "\\'")
        about = f" -d '{quoted}'" if text else ""
        yield f"complete -c drivetrain -n '__drivetrain_at \"{path}\"' {what}{about}"
