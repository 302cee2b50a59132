"""A run folder as one page that a browser opens, or as pictures for a paper. No torch here."""
