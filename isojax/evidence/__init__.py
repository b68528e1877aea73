"""Tools that show where two executions part, by how much, and what is proved here."""
