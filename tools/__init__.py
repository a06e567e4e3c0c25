"""Command line and tools around the package. Nothing else imports from here."""

__all__: list[str] = []
