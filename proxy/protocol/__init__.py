"""The JSON that crosses a socket: OpenAI requests and responses, the generate protocol, errors. No behaviour, no I/O."""
