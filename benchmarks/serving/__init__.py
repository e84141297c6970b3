"""SGLang served on this library and on its own backends: speed, agreement, and a server under load. See README.md."""
