"""stdio servers that resume: the bridge, the token store, the identity of the host that started us."""
