"""Exit codes beside 0 (fine); 1 and 2 are those of the errors in `contracts.errors`."""

INTERRUPTED = 130
