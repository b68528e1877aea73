"""Everything with torch or vLLM in it: one graph, run by vLLM with the policy's own bits."""
