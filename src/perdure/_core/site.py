"""Says where the documentation is read: an installed package does not have it."""

SITE = "https://perdure.example/docs"
"""Where the pages are that `make docs` builds. `.example` is a name that nobody has: a release sets it, here and in the
project's metadata, which a test compares."""


def see(page: str, section: str) -> str:
    """Point to a section, at the end of a message."""
    return f"see {SITE}/{page}.html#{section}"
