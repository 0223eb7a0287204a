"""Plans for people: text, tables, HTML, plots."""
