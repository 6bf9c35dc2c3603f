"""The HTTP face: handlers that validate, call the pipeline and write. Nothing imports it but `app`."""
