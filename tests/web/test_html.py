"""Everything is escaped by construction, and what cannot be escaped is refused."""

from __future__ import annotations

import pytest

from holdfast.web.html import Html, document, embedded, h, join


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (h("p", "<script>alert(1)</script>"), "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
        (h("p", "a & b"), "<p>a &amp; b</p>"),
        (h("a", "x", title='"><img onerror=x>'), '<a title="&quot;&gt;&lt;img onerror=x&gt;">x</a>'),
        (h("p", ["a", h("b", "<"), None, 3]), "<p>a<b>&lt;</b>3</p>"),
        (h("input", value="x", checked=True, disabled=False, name=None), '<input value="x" checked>'),
        (h("p", "bell\x07 escape\x1b[2J"), "<p>bell\u2407 escape\u241b[2J</p>"),
        (h("p", "over\u202eride"), "<p>over&lt;U+202E&gt;ride</p>"),
        (h("p", "zero\u200bwidth\ufeff"), "<p>zero&lt;U+200B&gt;width&lt;U+FEFF&gt;</p>"),
        (h("pre", "two\nlines\tand a tab"), "<pre>two\nlines\tand a tab</pre>"),
        (h("time", class_="x", data_at="1", aria_label="y"), '<time class="x" data-at="1" aria-label="y"></time>'),
        (join("<", h("br")), "&lt;<br>"),
    ],
)
def test_texts_and_attributes_are_escaped(made: Html, text: str) -> None:
    assert str(made) == text


def test_html_has_no_other_maker() -> None:
    with pytest.raises(TypeError):
        Html("<script>", object())


@pytest.mark.parametrize("tag", ["style", "iframe", "object", "p onclick", "a><script", "base", "foreignObject"])
def test_an_element_that_could_run_something_is_refused(tag: str) -> None:
    with pytest.raises(ValueError, match="element"):
        h(tag)


@pytest.mark.parametrize("name", ["onclick", "onError", "style", "srcdoc", "x y", "formaction"])
def test_an_attribute_that_could_run_something_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="attribute"):
        h("p", **{name: "x"})


@pytest.mark.parametrize(
    "link",
    ["javascript:alert(1)", "//evil.example", "https://evil.example", "data:text/html,x", " /x", "vbscript:x", ""],
)
def test_a_link_leads_to_this_server(link: str) -> None:
    with pytest.raises(ValueError, match="not a page"):
        h("a", "x", href=link)


def test_names_that_are_not_text_are_shown() -> None:
    assert document(h("p", "\udcff")) == b"<!doctype html>\n<p>&lt;U+DCFF&gt;</p>"


def test_an_embedded_script_cannot_end_its_element() -> None:
    assert str(embedded("style", "a > b {}")) == "<style>a > b {}</style>"
    for content in ("</style><script>", "<!--"):
        with pytest.raises(ValueError, match="end its element"):
            embedded("style", content)
