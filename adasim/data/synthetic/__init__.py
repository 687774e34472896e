"""Generated images of patterns, for the demo, the desk recipes and the tests."""
