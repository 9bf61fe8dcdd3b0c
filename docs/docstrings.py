"""Examples in docstrings as code: mkdocstrings takes ``>>>`` for a quotation otherwise."""

from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Put each example between fences."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Change the docstring of a function, a class or a module."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return a text with every example, which ends at an empty line, between fences."""
    lines: list[str] = []
    within = False
    for line in text.splitlines():
        if line.startswith(">>> ") and not within:
            lines += ["", "```pycon"]
            within = True
        elif within and not line.strip():
            lines.append("```")
            within = False
        lines.append(line)
    return "\n".join([*lines, "```"] if within else lines)
