"""One file per kind of tool syntax: an incremental transducer from markup to the JSON of the arguments."""
