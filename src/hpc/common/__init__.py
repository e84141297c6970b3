"""The only code that operators share: checks, errors, device facts, the registry, launch helpers."""
