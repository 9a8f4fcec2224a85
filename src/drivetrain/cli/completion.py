"""The command ``drivetrain completion``: completion for bash, zsh and fish, made from the table and the parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence

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
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](tree))
    return 0


def _words(
    path: str, parser: argparse.ArgumentParser, commands: Mapping[str, command.Command] | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield for a command, and for those below it, its path ("checkpoint diff") and the words that may follow it."""
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
    """Return the shell's pattern for the path so far and the next word, if that word is a command."""
    return separator.join(f'"{path}"' if " " in path else f'" {path}"' for path in tree if path)


def _bash(tree: Mapping[str, Mapping[str, str]]) -> str:
    cases = "\n".join(f'        "{path}") words={shlex.quote(" ".join(words))} ;;' for path, words in tree.items())
    return rf"""_drivetrain() {{
    local path="" words="" each word=${{COMP_WORDS[COMP_CWORD]}}
    for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $each" in {_is_command(tree, "|")}) path="${{path:+$path }}$each" ;; esac
    done
    case "$path" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
        *) COMPREPLY=($(compgen -W "$words" -X "-*" -- "$word")) ;;
    esac
}}
complete -o default -F _drivetrain drivetrain"""


def _zsh(tree: Mapping[str, Mapping[str, str]]) -> str:
    def listed(words: Mapping[str, str]) -> str:
        return " ".join(shlex.quote(f"{word}:{text}" if text else word) for word, text in words.items())

    cases = "\n".join(
        f'        "{path}") options=({listed({each: words[each] for each in words if each.startswith("-")})})\n'
        f"            commands=({listed({each: words[each] for each in words if not each.startswith('-')})}) ;;"
        for path, words in tree.items()
    )
    return rf"""_drivetrain() {{
    local at="" each
    local -a options commands
    for each in "${{(@)words[2,CURRENT-1]}}"; do
        case "$at $each" in {_is_command(tree, "|")}) at="${{at:+$at }}$each" ;; esac
    done
    case "$at" in
{cases}
    esac
    if [[ $PREFIX == -* ]]; then
        _describe -o option options
    elif (( $#commands )); then
        _describe command commands || _files
    else
        _files
    fi
}}
compdef _drivetrain drivetrain"""


def _fish(tree: Mapping[str, Mapping[str, str]]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [
        f"complete -c drivetrain -n '__drivetrain_at \"{path}\"' "
        + (f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}")
        + (f" -d {quoted(text)}" if text else "")
        for path, words in tree.items()
        for word, text in words.items()
    ]
    return "\n".join([rf"""function __drivetrain_at
    set -l path ""
    for each in (commandline -opc)
        switch "$path $each"
            case {_is_command(tree, " ")}
                set path (string trim "$path $each")
        end
    end
    test "$path" = "$argv[1]"
end""", *lines])  # fmt: skip
