"""Small things that everybody may use, one idea a file."""
