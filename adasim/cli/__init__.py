"""The command line: one file per command, words in, one sentence out."""
