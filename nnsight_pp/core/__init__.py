"""Words: plain data that the other folders speak in, and the seams between them."""
