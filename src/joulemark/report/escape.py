"""Text from outside, made harmless for the place where it is printed and otherwise left character for character."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MARKDOWN = re.compile(r"[\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_])")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_NOT_IN_CSV = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    r"""Text on one line in which nothing steers a terminal or hides: ``\x1b``, ``\n``, ``\u202e`` stand for themselves.

    Control and format characters (escape sequences, line breaks, marks that turn the direction of writing,
    characters without width) and lone surrogates are spelt out.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_spelt(char) if unicodedata.category(char) in _INVISIBLE else char for char in text)


def _spelt(char: str) -> str:
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char) or ascii(char)[1:-1]


NO_BREAK = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(?:%|[pnµmkMGT]?(?:s|J|W|Hz)|[KMGT]i?B|[kMG])(?![\w]))")


def together(text: str) -> str:
    """Printable text whose units stay on the line of their numbers."""
    return _UNIT.sub(NO_BREAK, printable(text))


def markdown(text: str) -> str:
    """Text that Markdown shows as it is, in a table cell or beside one: no markup, no HTML, no links, no new cell.

    Underscores within words are left alone, as GitHub leaves them.
    """
    plain = "".join(_HTML.get(char, char) for char in printable(text))
    return _MARKDOWN.sub(lambda match: "\\" + match.group(), plain)


def csv_text(text: str) -> str:
    """A text cell that no spreadsheet takes for a formula: an apostrophe goes before ``= + - @``, tab and return.

    Line breaks stay (their cell is quoted), other control characters and lone surrogates are spelt out.
    """
    plain = _NOT_IN_CSV.sub(lambda match: ascii(match.group())[1:-1], text)
    return "'" + plain if plain.startswith(_FORMULA) else plain


def display_width(text: str) -> int:
    """Columns that printable text takes in a terminal: wide characters two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def shorten(text: str, width: int) -> str:
    """Printable text within a number of terminal columns, its middle replaced by ``…`` if need be."""
    if display_width(text) <= width:
        return text
    head, tail = "", ""
    left, right = 0, len(text) - 1
    while left <= right:
        grow_head = display_width(head) <= display_width(tail)
        char = text[left] if grow_head else text[right]
        if display_width(head) + display_width(tail) + display_width(char) + 1 > width:
            break
        if grow_head:
            head, left = head + char, left + 1
        else:
            tail, right = char + tail, right - 1
    return f"{head}…{tail}"


def shorten_apart(texts: Iterable[str], width: int) -> dict[str, str]:
    """Printable texts within a number of columns, see :func:`shorten`, of which no two become one.

    Texts that would, or that would lose a part of a word that tells them apart, are cut beside those words. Where the
    words alone are too wide, they stay equal.
    """
    short = {text: shorten(text, width) for text in dict.fromkeys(texts)}
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for text, one in short.items():
        if one != text:
            head, _, tail = one.partition("…")
            groups[_whole_words(head), _whole_words(tail[::-1])].append(text)
    for group in groups.values():
        if len(group) > 1:
            short |= _cut_beside_differences(group, width)
    return short


def _cut_beside_differences(texts: Sequence[str], width: int) -> dict[str, str]:
    head = _whole_words(_common_begin(texts))
    tail = _whole_words(_common_begin([text[len(head) :][::-1] for text in texts]))[::-1]
    out = {}
    for text in texts:
        middle = text[len(head) : len(text) - len(tail)]
        room = width - display_width(middle)
        if room < _LEAST_BESIDE:
            return {}
        before = _begin(head, max(room // 2, room - display_width(tail)))
        after = _begin(tail[::-1], room - display_width(before))[::-1]
        out[text] = before + middle + after
    return out


_LEAST_BESIDE = 4


def _common_begin(texts: Sequence[str]) -> str:
    pairs = zip(min(texts), max(texts), strict=False)  # all others stand between these two
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _whole_words(text: str) -> str:
    while text and text[-1].isalnum():
        text = text[:-1]
    return text


def _begin(text: str, width: int) -> str:
    """The begin of a text, and an ellipsis, within a number of columns."""
    if display_width(text) <= width:
        return text
    while text and display_width(text) + 1 > width:
        text = text[:-1]
    return text + "…"
