"""How each model family writes reasoning and tool calls, as declarations; see README.md in this folder."""
