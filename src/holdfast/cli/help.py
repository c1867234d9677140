"""`holdfast help`: the help of a command, as `--help` prints it."""

from __future__ import annotations

import click

from holdfast.cli import options
from holdfast.cli.output import Output


@click.command("help", short_help="Show the help for a command.")
@click.argument("names", metavar="[COMMAND]...", nargs=-1)
@options.with_output
def show_help(output: Output, *, names: tuple[str, ...]) -> None:
    """Show the help for COMMAND, or for 'holdfast' itself.

    \b
    Examples:
      holdfast help
      holdfast help gc run
    """
    context = click.get_current_context().find_root()
    for name in names:
        group = context.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"'{context.command_path}' has no command {name!r}.", context)
        found, command, _ = group.resolve_command(context, [name])  # raises with a suggestion
        assert command is not None
        context = click.Context(command, info_name=found, parent=context)
    text = context.get_help()
    if output.as_json:
        output.result({"command": context.command_path, "help": text})
    else:
        output.text(text)
