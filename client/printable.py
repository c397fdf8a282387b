"""Make a peer's text safe to show: none of its escape sequences reaches a terminal or a log."""

TEXT_CHARS_MAX = 1000


def printable(text: str) -> str:
    """`text` with every unprintable character replaced, cut at `TEXT_CHARS_MAX`."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:TEXT_CHARS_MAX])
