"""The JSON that crosses a socket: OpenAI requests, the generate protocol, errors. No behaviour, no I/O."""
