"""Matrix products with fused epilogues, and the tile loop that overlapped operators share."""
