"""Bridges to inference engines. Each module imports without its engine; nothing here is loaded by `import hpc`."""
