"""Groups of commands whose modules are loaded when one of them is called, not before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Entry(NamedTuple):
    """A command that is loaded on demand: `module:attribute`, and the line that help shows for it."""

    place: str
    help: str
    hidden: bool = False


class CommandMissing(click.UsageError):
    """A group was named without any of its commands: what helps is its help."""

    def __init__(self, context: click.Context) -> None:
        super().__init__(f"'{context.command_path}' needs a command.", context)
        self.help = context.get_help()


ELSEWHERE = (
    {"add", "create", "define", "make", "new", "take"},
    {"cancel", "delete", "drop", "remove", "rm"},
    {"close", "complete", "done", "finish", "resolve"},
    {"commit", "save", "snapshot"},
    {"cat", "get", "info", "inspect", "show", "view"},
    {"list", "ls"},
    {"log", "history"},
    {"lock", "acquire"},
    {"unlock", "release"},
    {"move", "mv", "rename"},
    {"checkout", "restore", "revert", "undo"},
    {"branch", "workspace", "worktree"},
    {"branch", "ref", "tag"},
    {"refresh", "renew", "extend", "heartbeat"},
    {"check", "fsck", "doctor", "verify", "validate"},
    {"prune", "clean", "gc"},
    {"next", "claim-next", "ready"},
)
"""Words that other programs use for what some command here does: whoever types one is told ours."""


def _meant(name: str, known: list[str]) -> list[str]:
    """The commands that are spelled like this name, else those that it may stand for."""
    from difflib import get_close_matches

    spelled_alike = get_close_matches(name, known, cutoff=0.7)
    return spelled_alike or [each for each in known if any({name, each} <= words for words in ELSEWHERE)]


class Group(click.Group):
    """Commands in the order in which they were declared; those in `table` are loaded on demand."""

    def __init__(self, *arguments: Any, table: Mapping[str, Entry] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.table = dict(table or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, hidden ones included."""
        return [*self.table, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with this name, loaded now if it has to be."""
        command = self._loaded(ctx, cmd_name)
        if command is not None and ctx.resilient_parsing:  # a shell asks how the line may go on
            from holdfast.cli.completing import offer_names

            offer_names(command, f"{ctx.command_path} {cmd_name}".partition(" ")[2])
        return command

    def _loaded(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.table:
            from importlib import import_module

            module, _, attribute = self.table[cmd_name].place.partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            return command
        return super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the group's own options; without any argument, say which commands there are."""
        if not args and not ctx.resilient_parsing:
            raise CommandMissing(ctx)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names, or say which ones are spelled like it."""
        name = args[0]
        if name in self.list_commands(ctx) or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        similar = _meant(name, [known for known, _ in self._shown(ctx)])
        meant = f" Did you mean {' or '.join(map(repr, similar))}?" if similar else ""
        raise click.UsageError(f"There is no command {name!r}.{meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl(self._shown(ctx))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands and options that begin like this."""
        from click.shell_completion import CompletionItem

        commands = [
            CompletionItem(name, help=text) for name, text in self._shown(ctx) if name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def _shown(self, ctx: click.Context) -> list[tuple[str, str]]:
        loaded_on_demand = [(name, entry.help) for name, entry in self.table.items() if not entry.hidden]
        return loaded_on_demand + [
            (name, command.get_short_help_str(100))
            for name, command in self.commands.items()
            if not command.hidden
        ]
