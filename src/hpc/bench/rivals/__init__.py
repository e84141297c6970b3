"""Other libraries' implementations, as optional providers. None of them is ever a dependency."""
