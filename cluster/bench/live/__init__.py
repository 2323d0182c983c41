"""`diptych bench live`: whole servers on this machine, ours and vLLM's, under the same requests."""
