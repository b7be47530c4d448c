"""Measures systems side by side: same prompts, same run, interleaved."""
