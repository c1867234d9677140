"""Forms: each is one action, which the scripts send as JSON. Without --writable, no page has one."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.web.html import Child, Html, h
from holdfast.web.layout import PageRequest, address


def action_form(asked: PageRequest, action: str, button: str, *fields: Child, **hidden: str) -> Html:
    """A form for an action; `hidden` are the fields that the page knows."""
    known = [h("input", type="hidden", name=name, value=value) for name, value in hidden.items()]
    return h(
        "form",
        known,
        *fields,
        h("button", button),
        action=address(asked.workspace, "do", action),
        method="post",
        class_="action",
        data_action=action,
    )


def field(title: str, control: Child) -> Html:
    return h("label", h("span", title), control)


def text_field(title: str, name: str, value: str, *, hint: str | None = None) -> Html:
    return field(title, h("input", name=name, value=value, autocomplete="off", placeholder=hint))


def select_field(title: str, name: str, choices: Sequence[tuple[str, str]], chosen: str = "") -> Html:
    options = [h("option", text, value=value, selected=value == chosen) for value, text in choices]
    return field(title, h("select", options, name=name))
