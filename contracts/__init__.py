"""The execution contract: types, identities, claims, validation, diff and handshake."""
