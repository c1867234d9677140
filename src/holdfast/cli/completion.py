"""`holdfast completion`: print the completion script of a shell."""

from __future__ import annotations

import click

from holdfast.cli.options import json_option
from holdfast.cli.output import Output


@click.command()
@click.argument("shell", metavar="SHELL", type=click.Choice(("bash", "zsh", "fish")))
@json_option
@click.pass_obj
def completion(output: Output, *, shell: str) -> None:
    """Print the completion script for SHELL. It completes commands, options and names, such as those of worktrees.

    \b
    bash (4.4 or later), in ~/.bashrc:
      eval "$(holdfast completion bash)"
    zsh, in ~/.zshrc after compinit:
      eval "$(holdfast completion zsh)"
    fish, once:
      holdfast completion fish > ~/.config/fish/completions/holdfast.fish
    """
    from click.shell_completion import ShellComplete, get_completion_class

    from holdfast.cli.entry import COMPLETION_VARIABLE, NAME, root

    kind = get_completion_class(shell)
    assert kind is not None
    # Not `kind.source()`: for bash, it would run bash to check its version.
    script = ShellComplete.source(kind(root, {}, NAME, COMPLETION_VARIABLE)).rstrip("\n")
    if output.as_json:
        output.result({"shell": shell, "script": script + "\n"})
    else:
        output.text(script)
