"""The OpenAI-compatible part: requests in, completions out."""
