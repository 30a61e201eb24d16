"""A Griffe extension for mkdocs.yml that converts this project's docstring conventions to Markdown.

Lines of the form ``name: text``, with indented continuation lines, become items of a list, also in sections such as
"Args:". A line that begins with "Returns", "Yields" or "Raises" begins a paragraph. Everything else is Markdown
already.
"""

import re

from griffe import Docstring, Extension, Object

_ITEM = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.+)")
_PARAGRAPH = re.compile(r"(Returns|Yields|Raises)[ :]")
_SECTION = re.compile(r"(Args|Raises|Returns|Yields):")
_ITEM_OF_SECTION = re.compile(r"(\w+(?:, \w+)*): (.+)")


class Docstrings(Extension):
    """Griffe extension that rewrites every docstring."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring = Docstring(
                to_markdown(obj.docstring.value),
                lineno=obj.docstring.lineno,
                endlineno=obj.docstring.endlineno,
                parent=obj,
            )


def to_markdown(text: str) -> str:
    lines: list[str] = []
    in_section = in_item = False
    for line in text.split("\n"):
        if _SECTION.fullmatch(line):
            lines += ["", f"**{line}**", ""]
            in_section, in_item = True, False
            continue
        in_section = in_section and (not line or line.startswith("    "))
        if in_section:
            line = line.removeprefix("    ")
        item = (_ITEM_OF_SECTION if in_section else _ITEM).fullmatch(line)
        if item is not None:
            names, what = item.groups()
            line = f"- `{names.replace(', ', '`, `')}`: {what}"
        goes_on = in_item and (item is not None or not line or line.startswith("    "))
        if not goes_on and (item is not None or in_item or _PARAGRAPH.match(line)):
            lines.append("")
        in_item = item is not None or goes_on
        lines.append(line)
    return "\n".join(lines)
