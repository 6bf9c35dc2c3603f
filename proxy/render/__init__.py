"""Request -> token ids. Pure: no I/O, no clock, no HTTP."""
