"""The `isojax` command."""
