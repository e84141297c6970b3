"""Prefill attention over a paged cache or ragged keys, with a longest-first schedule built on the device."""
