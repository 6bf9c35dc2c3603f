"""Token ids -> response. Pure: no I/O, no clock, no HTTP."""
