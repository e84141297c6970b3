"""Paged decode attention with a schedule built on the device."""
