"""Wire contracts: the public gRPC API (`inference.proto`) and the internal frames (`frames`)."""
