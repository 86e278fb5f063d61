"""Text from tasks, policies and sandboxes, made harmless for a page."""

from html import escape


def told(text: str) -> str:
    """Escaped for HTML; control characters (also those that turn the reading direction) become a visible mark."""
    return escape("".join(c if c.isprintable() else "�" for c in text))


def visible(text: str) -> str:
    """`told`, with white space made visible too."""
    return told(text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")) or "∅"
