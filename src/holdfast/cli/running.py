"""What the `run` commands have in common: how `run ... -- COMMAND` is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from holdfast.cli.output import Output

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class RunCommand(click.Command):
    """A command that runs another one, which is everything after `--`. It gets it as `command`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the arguments apart at `--`: ours before it, the command to run after it."""
        if isinstance(ctx.obj, Output):
            ctx.obj.leave_stdout_to_the_command()
        cut = args.index("--") if "--" in args else len(args)
        command = tuple(args[cut + 1 :])
        ctx.allow_extra_args = ctx.ignore_unknown_options = not command  # they are its words, misplaced
        rest = super().parse_args(ctx, args[:cut])
        if not command and not ctx.resilient_parsing:
            raise click.UsageError("There is no command to run: write it after '--'.", ctx)
        ctx.params["command"] = command
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Our options; otherwise files, as for any word of a command."""
        from click.shell_completion import CompletionItem

        found = super().shell_complete(ctx, incomplete)
        return found if found or incomplete.startswith("-") else [CompletionItem(incomplete, type="file")]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The usage line, with the command at its end."""
        return [*super().collect_usage_pieces(ctx), "--", "COMMAND..."]
