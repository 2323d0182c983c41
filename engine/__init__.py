"""The engine of one replica: paged KV, chunked prefill, continuous batching of decode."""
