"""Commands that measure autoshard against compilers; each writes a page of docs/."""
